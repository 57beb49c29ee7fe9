#!/usr/bin/python
"""Ansible module: start the extraction client."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_extract
short_description: Start the client that pushes the data set through the extraction server
description:
  - Starts the client in its own unit or session and lets go of it; the canary comes first, then the data set.
  - M(hs_progress) tells how it is doing. A client that runs already is left alone.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  run_id: {description: The run that M(hs_begin) returned., type: str, required: true}
  view: {description: What M(hs_preflight) found; check mode tells from it what would happen., type: dict, default: {}}
attributes:
  check_mode: {support: full, description: Says what would be extracted.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Start the extraction
  hs_extract:
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
    """Start, or say so."""
    given = module.params
    if module.check_mode:
        return {"changed": True, "said": ["would prove the states on a few sequences, then extract the data set"]}
    return steps.extract(given["state_dir"], given["run_id"])


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
