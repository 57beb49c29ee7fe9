#!/usr/bin/python
"""Ansible module: one record in the run's journal, for a step that Ansible itself does."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_note
short_description: Record the begin or end of a step in the run's journal
description:
  - Writes one record and renews the dead-man's lease, for a step that is done by another module (the source edit).
  - Refuses when the run was restored meanwhile, so that no step goes forward behind a restore.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: The run that M(hs_begin) returned., type: str, required: true}
  step: {description: Name of the step., type: str, required: true}
  state: {description: What to record., type: str, choices: [begun, done], required: true}
  detail: {description: One line for a person., type: str, default: ''}
  lease:
    description: Seconds within which the next record comes; past them the guard restores. 0 - the run's own patience.
    type: int
    default: 0
attributes:
  check_mode: {support: full, description: Writes nothing.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Record that the edit begins
  hs_note:
    state_dir: /var/lib/sglang-hs
    run_id: "{{ hs_run.run_id }}"
    step: patch
    state: begun
"""

RETURN = r""" # """

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import turns  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Record. The journal is bookkeeping, not a change of the host: changed stays false."""
    given = module.params
    if not module.check_mode:
        turns.note(
            given["state_dir"], given["run_id"], given["step"], given["state"], given["detail"], float(given["lease"])
        )
    return {"changed": False}


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "required": True},
            "step": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["begun", "done"], "required": True},
            "detail": {"type": "str", "default": ""},
            "lease": {"type": "int", "default": 0},
        },
        work,
    )


if __name__ == "__main__":
    main()
