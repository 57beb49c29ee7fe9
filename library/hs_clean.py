#!/usr/bin/python
"""Ansible module: list past runs and their output folders, and remove one that is named in full."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_clean
short_description: List past runs and output folders, and remove one that is named in full
description:
  - Without O(name) it lists and changes nothing.
  - With it, that run's folder of logs or that output folder is removed, if it is on the list. The open run and its output folder, what
    has no journal or book of an extraction in it, the root of a file system and whatever has one mounted in it are refused; symbolic
    links are not followed.
  - Of an output folder only files go that an extraction writes; a stranger's file stays, and is named.
options:
  state_dir: {description: Folder of the journals on the host., type: path, required: true}
  name: {description: 'A run, or the absolute path of an output folder, as listed; empty to list.', type: str, default: ''}
  incomplete: {description: 'Remove it also where it did not come to its end.', type: bool, default: false}
  outputs: {description: Output folders to list beside those that the journals know., type: list, elements: str, default: []}
attributes:
  check_mode: {support: full, description: Says what would go.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: What is there?
  hs_clean:
    state_dir: /var/lib/sglang-hs
    outputs: [/data/hidden-states]

- name: Remove the logs of a run
  hs_clean:
    state_dir: /var/lib/sglang-hs
    name: 20260930-214502-9f3a
"""

RETURN = r"""
lines: {description: What there is or what went; one line each., type: list, elements: str, returned: always}
runs:
  description: 'run_id, path, bytes, opened, closed, outcome, complete, open, output of each past run.'
  type: list
  elements: dict
  returned: when listing
outputs:
  description: 'path, ours, complete, samples, total, bytes, runs, in_use of each output folder.'
  type: list
  elements: dict
  returned: when listing
removed: {description: 'name, files, bytes, strangers, left of what went.', type: dict, returned: when a name was given}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import runs  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """List, or remove."""
    given = module.params
    if not given["name"]:
        found = runs.known(given["state_dir"], given["outputs"])
        return {"changed": False, "lines": runs.lines(found), "runs": found["runs"], "outputs": found["outputs"]}
    done = runs.remove(given["state_dir"], given["name"], given["incomplete"], given["outputs"], module.check_mode)
    return {"changed": True, "lines": runs.removed_lines(done, module.check_mode), "removed": done}


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "name": {"type": "str", "default": ""},
            "incomplete": {"type": "bool", "default": False},
            "outputs": {"type": "list", "elements": "str", "default": []},
        },
        work,
    )


if __name__ == "__main__":
    main()
