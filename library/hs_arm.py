#!/usr/bin/python
"""Ansible module: write the run's units and set the guard's timer on watch."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_arm
short_description: Write a run's units of systemd and start the dead-man's timer
description:
  - Writes the units (whole or not at all, mode 0644), lets systemd read them, and enables and starts the guard's timer.
  - Does nothing where the units are as asked for and the timer runs. One round trip for all of it, as production waits.
options:
  units:
    description: The units, each with the C(path) of its file and its C(text).
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: Where the unit's file lies., type: path, required: true}
      text: {description: The whole file., type: str, required: true}
attributes:
  check_mode: {support: full, description: Says whether anything would change.}
  diff_mode: {support: full, description: The units' texts.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Write the units and start the dead-man's timer
  hs_arm:
    units:
      - path: /etc/systemd/system/sglang-hs-guard.timer
        text: "{{ lookup('ansible.builtin.template', 'sglang-hs-guard.timer.j2') }}"
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import units  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Write, or say so."""
    wanted = {unit["path"]: unit["text"] for unit in module.params["units"]}
    diff = [
        {"before_header": one["path"], "after_header": one["path"], "before": one["before"], "after": one["after"]}
        for one in units.differences(wanted)
    ]
    return {"changed": bool(diff) if module.check_mode else units.arm(wanted), "diff": diff}


def main() -> None:
    """Entry point."""
    run(
        {
            "units": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {"path": {"type": "path", "required": True}, "text": {"type": "str", "required": True}},
            },
        },
        work,
    )


if __name__ == "__main__":
    main()
