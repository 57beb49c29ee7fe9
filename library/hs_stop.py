#!/usr/bin/python
"""Ansible module: stop production without harm."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_stop
short_description: Stop the production server of a run
description:
  - Stops production as it is managed (unit, commands, or the adopted process), waits until its port is free, its processes are
    gone and the GPUs have their memory back.
  - SIGTERM goes to the main process alone; after hs_stop_timeout seconds SIGKILL goes to the server's own processes and to nobody else.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: The run that M(hs_begin) returned., type: str, required: true}
  view: {description: What M(hs_preflight) found; check mode tells from it what would happen., type: dict, default: {}}
attributes:
  check_mode: {support: full, description: Says what would be stopped.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Stop production
  hs_stop:
    state_dir: /var/lib/sglang-hs
    run_id: "{{ hs_run.run_id }}"
    view: "{{ hs_found.view }}"
"""

RETURN = r"""
said: {description: What was done or found, line by line., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import steps  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Stop, or say what would be stopped."""
    given = module.params
    if module.check_mode:
        pid = given["view"].get("production_pid")
        return {"changed": bool(pid), "said": ["would stop {}".format(given["view"].get("production"))]}
    return steps.stop(given["state_dir"], given["run_id"])


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "required": True},
            "view": {"type": "dict", "default": {}},
        },
        work,
    )


if __name__ == "__main__":
    main()
