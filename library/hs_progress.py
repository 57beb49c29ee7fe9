#!/usr/bin/python
"""Ansible module: how a long step of the run is doing. Polled by the hs_watch action."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_progress
short_description: Ask how the launch, the extraction or the restore of a run, or a move, is doing
description:
  - Returns at once, or, with O(wait), when there is news. When the step is over its end is recorded in the journal.
  - Used through the action M(hs_watch), which asks again and again and survives a link that breaks.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: The run; for a restore it may be empty., type: str, default: ''}
  what: {description: Which step., type: str, choices: [launch, extract, restore, move], required: true}
  wait: {description: 'Seconds to wait for news: the step is over, or in another phase than O(phase).', type: float, default: 0}
  phase: {description: The phase of the last answer., type: str, default: ''}
attributes:
  check_mode: {support: full, description: There is nothing to wait for.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Ask how the extraction is doing
  hs_progress:
    state_dir: /var/lib/sglang-hs
    run_id: "{{ hs_run.run_id }}"
    what: extract
"""

RETURN = r"""
finished: {description: Whether the step is over., type: bool, returned: always}
step_failed: {description: Whether it is over and failed., type: bool, returned: always}
phase: {description: 'What it is at, in a word; a log gets a line when it changes.', type: str, returned: always}
line: {description: One line for a person., type: str, returned: always}
mood: {description: 'Empty, or warn (errors so far), or bad.', type: str, returned: for a launch and an extraction}
result: {description: The client's own result., type: dict, returned: when an extraction is over}
lines: {description: What the restore found and did., type: list, elements: str, returned: when a restore is over}
"""

import time  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import watching  # noqa: E402
from ansible.module_utils.sglang_hs.journal import Paths  # noqa: E402

# seconds between two looks. A launch and a restore last minutes, with production down; an extraction lasts hours, and each look asks systemd,
# so there the client's result has the next look come early
LOOK = {"launch": 0.2, "restore": 0.2, "extract": 0.5, "move": 0.5}
SOON = 0.1


def nap(given: dict) -> None:
    """Until the next look."""
    until = time.monotonic() + LOOK[given["what"]]
    result = Paths(given["state_dir"]).run(given["run_id"]) / "result.json" if given["what"] == "extract" else None
    while True:
        time.sleep(SOON)
        if time.monotonic() >= until or (result is not None and result.exists()):
            return


def work(module: AnsibleModule) -> dict:
    """Ask."""
    given = module.params
    if module.check_mode:
        return {
            "changed": False,
            "finished": True,
            "step_failed": False,
            "phase": "check mode",
            "line": "check mode: nothing to wait for",
        }
    # on the host, where a look costs little: each question anew is a connection and the start of a Python
    until = time.monotonic() + given["wait"]
    while True:
        if given["what"] == "restore":
            found = watching.restoring(given["state_dir"])
        elif given["what"] == "move":
            # not at every question on a run: a module compiles what it imports at every start
            from ansible.module_utils.sglang_hs import movejob

            found = movejob.progress(given["state_dir"])
        else:
            found = watching.progress(given["state_dir"], given["run_id"], given["what"])
        if found["finished"] or found["phase"] != given["phase"] or time.monotonic() > until:
            break
        nap(given)
    found["step_failed"] = found.pop("failed")
    return dict({"changed": False}, **found)


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "default": ""},
            "wait": {"type": "float", "default": 0.0},
            "phase": {"type": "str", "default": ""},
            "what": {"type": "str", "choices": ["launch", "extract", "restore", "move"], "required": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
