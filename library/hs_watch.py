#!/usr/bin/python
"""Documentation of the hs_watch action; the work is in action_plugins/hs_watch.py, on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_watch
short_description: Watch a long step of a run until it is over, and say how it is doing
description:
  - Asks M(hs_progress) again and again, says how the step is doing, and ends when it is over. Runs on the controller.
  - On a terminal each host has one line that is drawn in place, by the callback hs_live, which V(ansible.cfg) enables. In a log lines come
    now and then.
  - A link that breaks is shown and waited out. The step itself is a job of its own on the host, so watching may end at any time.
options:
  what: {description: Which step., type: str, choices: [launch, extract, restore, move], required: true}
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: The run; for a restore it may be empty., type: str, default: ''}
  every: {description: 'Seconds between two questions; 1 at first, then 2 on a terminal and 5 for a log, where it is not given.', type: float}
  log_every:
    description: Without a terminal a line is written when the phase changes, and after so many seconds when the line is another one.
    type: float
    default: 30
  patience: {description: Seconds without a link before the watching is given up., type: float, default: 900}
attributes:
  check_mode: {support: full, description: There is nothing to wait for.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Watch the extraction
  hs_watch:
    what: extract
    state_dir: /var/lib/sglang-hs
    run_id: "{{ hs_run.run_id }}"
"""

RETURN = r"""
line: {description: The last line., type: str, returned: always}
result: {description: The client's own result., type: dict, returned: when an extraction is over}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def main() -> None:
    """Never on a host: Ansible runs the action of the same name instead."""
    AnsibleModule(argument_spec={}).fail_json(msg="hs_watch is an action; action_plugins of this project is not in use")


if __name__ == "__main__":
    main()
