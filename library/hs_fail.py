#!/usr/bin/python
"""Documentation of the action hs_fail, which runs on the controller alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_fail
short_description: Fail, and say with which status ansible-playbook ends
description:
  - Fails as M(ansible.builtin.fail) does.
  - Where all failed hosts ask for the same O(exit_status), C(ansible-playbook) ends with it instead of Ansible's own 2. That is done by
    the callback C(hs_exit_status), which V(ansible.cfg) enables.
options:
  msg: {description: What to say., type: str, required: true}
  exit_status: {description: 'Status to end with; 0 leaves it to Ansible.', type: int, default: 0}
attributes:
  check_mode: {support: full, description: It fails in check mode too.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: End as a run that was cut by its window
  hs_fail:
    msg: 40 of 64 samples are done; the next run goes on from there
    exit_status: 75
"""

RETURN = r"""
hs_exit_status: {description: What was asked for., type: int, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402


def main() -> None:
    """Never on a host: Ansible runs the action of the same name instead."""
    AnsibleModule(argument_spec={}).fail_json(msg="hs_fail is an action; action_plugins of this project is not in use")


if __name__ == "__main__":
    main()
