#!/usr/bin/python
"""Ansible module: the lengths of a data set's rows. Reads only. The action of the same name keeps them on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_index
short_description: Read a data set once, so that it can be divided
description:
  - Reads every row, checks it, and notes how many tokens it has. An index that the controller keeps already is not made again.
  - On the host, in the engine's own Python; with O(source) on the controller.
options:
  dir: {description: Folder on the controller that keeps the index., type: path, required: true}
  settings: {description: The settings that M(hs_preflight) returned in its view., type: dict, required: true}
  source: {description: The data set on the controller; empty means on the host., type: str, default: ''}
  known: {description: Names of the indexes that are kept; the action fills it in., type: list, elements: str, default: []}
attributes:
  check_mode: {support: full, description: Reads only.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Read the data set
  hs_index:
    dir: /home/me/fleet
    settings: "{{ hs_found.view.settings }}"
  run_once: true
"""

RETURN = r"""
sha256: {description: Of the data set., type: str, returned: always}
name: {description: File of the index in the folder., type: str, returned: always}
index: {description: All of it as one line of text; the action takes it out., type: str, returned: when it was made}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import fleet  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Read, if it is not known."""
    settings = module.params["settings"]
    return dict(fleet.indexed(settings["dataset"], settings, module.params["known"]), changed=False)


def main() -> None:
    """Entry point."""
    run(
        {
            "dir": {"type": "path", "required": True},
            "settings": {"type": "dict", "required": True},
            "source": {"type": "str", "default": ""},
            "known": {"type": "list", "elements": "str", "default": []},
        },
        work,
    )


if __name__ == "__main__":
    main()
