#!/usr/bin/python
"""Ansible module: gather what a run was into one document, and keep it beside the output."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_report
short_description: Gather what a run was into one document
description:
  - Reads the run's journal, the client's result, the output folder's book; changes none of them, and needs nothing to be installed.
  - The document is kept as C(OUTPUT/runs/RUN_ID.json), or in the run's own folder where it came to no output folder. One that was made when
    the run had ended is used as it is, so that it still tells of that run when others followed.
  - No secret is in it - keys and tokens of command lines and environments are hidden, also where a message quotes them.
options:
  state_dir: {description: Folder of the journals on the host., type: path, required: true}
  run_id: {description: The run; empty for the last one., type: str, default: ''}
  output_dir: {description: 'Output folder to look into where no journal knows the run any more.', type: path, default: ''}
  again: {description: Gather it also where a finished document is kept., type: bool, default: false}
  failure: {description: 'How the playbook saw the run fail: task, msg, cut. Empty where it did not.', type: dict, default: {}}
  command: {description: 'How the playbook was started: argv, cwd, inventory.', type: dict, default: {}}
attributes:
  check_mode: {support: full, description: Gathers and writes nothing.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Gather what the last run was
  hs_report:
    state_dir: /var/lib/sglang-hs
    output_dir: /data/hidden-states
  register: hs_reported
"""

RETURN = r"""
document: {description: 'The document, as docs/report.md describes it.', type: dict, returned: always}
path: {description: Where it is kept on the host., type: str, returned: always}
run_id: {description: The run., type: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import report  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Gather, and keep."""
    given = module.params
    found = report.find(given["state_dir"], given["run_id"], given["output_dir"])
    told = {"run_id": found.run_id, "path": str(report.place(given["state_dir"], found))}
    document = None if given["again"] else report.kept(given["state_dir"], found)
    if document is not None:
        return dict(told, changed=False, document=document)
    document = report.gather(given["state_dir"], found, given["failure"], given["command"])
    if not module.check_mode:
        report.keep(given["state_dir"], found, document)
    return dict(told, changed=True, document=document)


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "default": ""},
            "output_dir": {"type": "path", "default": ""},
            "again": {"type": "bool", "default": False},
            "failure": {"type": "dict", "default": {}},
            "command": {"type": "dict", "default": {}},
        },
        work,
    )


if __name__ == "__main__":
    main()
