#!/usr/bin/python
"""Ansible module: how a host stands - who, since when, which step, what is edited, whether production answers, what next."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_status
short_description: Say how a host stands, without a lock and without a change
description:
  - Reads the journal, asks production for real generations, looks at the engine's source. Nothing has to be installed for it.
  - The same as C(hs status) in the host's own shell.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
attributes:
  check_mode: {support: full, description: It only looks.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: How does it stand?
  hs_status:
    state_dir: /var/lib/sglang-hs
  register: hs_status
"""

RETURN = r"""
status:
  description: >-
    open, last (run_id, operator, at, why, result; where none is open),
    run_id, operator, opened, deadline, restore_by (unix times), other_boot, restoring, lease, steps, step, server, client, progress,
    guard (kind, alive, detail), restore (at_work, tries, most, failed, failures, retry_at, log), production (how, expected, healthy,
    reason, log), edited (paths), sources (path, state), lock, situation (a word), next.
  type: dict
  returned: always
lines: {description: The same for a person., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import status  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Look."""
    found = status.look(module.params["state_dir"])
    return {"changed": False, "status": found, "lines": status.lines(found)}


def main() -> None:
    """Entry point."""
    run({"state_dir": {"type": "path", "required": True}}, work)


if __name__ == "__main__":
    main()
