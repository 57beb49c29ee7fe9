#!/usr/bin/python
"""Ansible module: is this host fit for an extraction? Reads only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_preflight
short_description: Examine a host that serves a model with SGLang before hidden states are extracted
description:
  - Finds the production server, asks it for real generations, finds the engine, its release and its options, reads the model's
    sizes, and looks for strangers on the ports and GPUs.
  - Reads only on the host, in check mode and out of it. Whatever does not fit is one message that says what, and what to do next.
  - A run that is open on the host is returned as RV(open_run) and nothing else is looked at, since production is down then.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  operator: {description: Who asks, from which controller., type: str, required: true}
  take_over: {description: Go on with another operator's open run., type: bool, default: false}
  wanted:
    description: What the operator asked for; the roles' variables without their prefix.
    type: dict
    required: true
  api_key: {description: Production's API key where it is not on its command line., type: str, default: ''}
attributes:
  check_mode: {support: full, description: 'Reads only. Out of it a remote that samples are to move to gets a small file, which is removed again.'}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Examine the host
  hs_preflight:
    state_dir: /var/lib/sglang-hs
    operator: me@laptop
    wanted: "{{ hs_wanted }}"
  register: hs_found
"""

RETURN = r"""
open_run: {description: 'The run that is open: run_id, holder, settings and view; empty when none is.', type: dict, returned: always}
view:
  description: What was found - settings, production, production_command, unit, command, environment, gpus, user, cwd, systemd.
  type: dict
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import preflight, steps  # noqa: E402
from ansible.module_utils.sglang_hs.journal import Journal, Paths, open_run  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Look at the host."""
    given = module.params
    opened = open_run(given["state_dir"])
    if opened:
        journal = Journal.load(Paths(given["state_dir"]))
        if journal is not None:
            steps.may_attach(journal, given["wanted"], given["operator"], given["take_over"])
        return {"changed": False, "open_run": opened, "view": opened["view"]}
    return {
        "changed": False,
        "open_run": {},
        "view": preflight.look(given["wanted"], given["api_key"] or "", module.check_mode),
    }


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "operator": {"type": "str", "required": True},
            "take_over": {"type": "bool", "default": False},
            "wanted": {"type": "dict", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
        },
        work,
    )


if __name__ == "__main__":
    main()
