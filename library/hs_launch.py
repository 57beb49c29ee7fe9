#!/usr/bin/python
"""Ansible module: start the extraction server."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_launch
short_description: Start the extraction server of a run
description:
  - Starts production's own command without what spoils a capture and with what a capture needs, in its own unit or session,
    with an empty dump folder, and lets go of it. M(hs_progress) tells when it is ready.
  - With diff the command is shown against production's.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: The run that M(hs_begin) returned., type: str, required: true}
  view: {description: What M(hs_preflight) found; check mode tells from it what would happen., type: dict, default: {}}
attributes:
  check_mode: {support: full, description: Says what would be launched; with diff, the command.}
  diff_mode: {support: full, description: Production's command against the extraction server's.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Launch the extraction server
  hs_launch:
    state_dir: /var/lib/sglang-hs
    run_id: "{{ hs_run.run_id }}"
    view: "{{ hs_found.view }}"
"""

RETURN = r"""
said: {description: What was done or found, line by line., type: list, elements: str, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import jobs, steps  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Launch, or show what would be launched."""
    given = module.params
    view = given["view"]
    diff = {}
    if module._diff and view:
        added = "".join("{}={}\n".format(key, view["environment"][key]) for key in sorted(view["environment"]))
        diff = {
            "before_header": "production's command",
            "after_header": "extraction server's command",
            "before": jobs.shown(view["production_command"]),
            "after": added + jobs.shown(view["command"]),
        }
    if module.check_mode:
        return {"changed": True, "said": ["would launch the extraction server"], "diff": diff}
    return dict(steps.launch(given["state_dir"], given["run_id"]), diff=diff)


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
