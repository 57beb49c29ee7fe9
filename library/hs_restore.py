#!/usr/bin/python
"""Ansible module: call the restore program on the target."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_restore
short_description: Bring production back with the restore program that is installed on the host
description:
  - Starts the restore program in a session of its own, so that a link that breaks cannot stop it half-way, and lets go;
    M(hs_progress) tells its outcome. Where no run is open it looks at once and returns RV(finished).
  - The same program is run by the guard, at boot and by C(hs restore) in the operator's shell.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: Restore only if this run is the open one; empty - whichever is., type: str, default: ''}
  operator: {description: Who asks; without a run_id a run of another operator that is at work is not ended., type: str, default: ''}
  take_over: {description: End another operator's run all the same., type: bool, default: false}
  why: {description: The reason, for the journal., type: str, default: asked for by the operator}
attributes:
  check_mode: {support: full, description: Says which run is open.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Bring production back
  hs_restore:
    state_dir: /var/lib/sglang-hs
"""

RETURN = r"""
finished: {description: Whether there was nothing to wait for., type: bool, returned: always}
lines: {description: What was found and done., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import restore  # noqa: E402
from ansible.module_utils.sglang_hs.errors import HsError  # noqa: E402
from ansible.module_utils.sglang_hs.journal import open_run  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Start the program, or look where no run is open."""
    given = module.params
    opened = open_run(given["state_dir"])
    if module.check_mode:
        line = "would restore the run of {}".format(opened["holder"]) if opened else "no run is open"
        return {"changed": bool(opened), "finished": True, "lines": [line]}
    if opened and not given["run_id"]:
        restore.may_end(given["state_dir"], given["operator"], given["take_over"])
    if opened and (not given["run_id"] or opened["run_id"] == given["run_id"]):
        restore.start_detached(given["state_dir"], given["why"], given["run_id"])
        return {"changed": False, "finished": False, "lines": ["restoring the run of {}".format(opened["holder"])]}
    report = restore.restore(given["state_dir"], given["why"], given["run_id"])
    if report.failures:
        raise HsError("; ".join(report.failures), "\n".join(report.lines))
    return {"changed": report.changed, "finished": True, "lines": report.lines}


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "default": ""},
            "operator": {"type": "str", "default": ""},
            "take_over": {"type": "bool", "default": False},
            "why": {"type": "str", "default": "asked for by the operator"},
        },
        work,
    )


if __name__ == "__main__":
    main()
