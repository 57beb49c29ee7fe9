#!/usr/bin/python
"""Ansible module: take the host's lock, open the journal, set the dead-man's guard on watch."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_begin
short_description: Begin a run on a host - guard, lock, journal, record of production
description:
  - Takes the host's lock atomically, opens the journal, records how production was started (mode 0600) and, on a host without
    systemd, starts the guard that brings production back when nobody else does. With systemd the guard is a timer, which is written and
    started with the run's other units, in the same round trip.
  - An open run of the same operator with the same wishes is attached to.
options:
  state_dir: {description: Folder of the journal on the host., type: path, required: true}
  operator: {description: Who asks, from which controller., type: str, required: true}
  take_over: {description: Go on with another operator's open run., type: bool, default: false}
  wanted: {description: What the operator asked for., type: dict, required: true}
  view: {description: What M(hs_preflight) found., type: dict, required: true}
  share: {description: 'The host''s part of the data set, as M(hs_divide) wrote it; empty: all of it.', type: str, default: ''}
  dataset: {description: The file with this host's rows alone; empty means the data set that was found., type: str, default: ''}
  bad_rows: {description: Rows of the data set that are left out., type: int, default: 0}
  api_key: {description: Production's API key where it is not on its command line., type: str, default: ''}
  units:
    description: Where systemd is, the run's units - the path of each file and its text, with C(@RUN@) for the name of the run.
    type: dict
    default: {}
attributes:
  check_mode: {support: full, description: Says that a run would begin.}
  diff_mode: {support: full, description: The units' texts.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Begin the run
  hs_begin:
    state_dir: /var/lib/sglang-hs
    operator: me@laptop
    wanted: "{{ hs_wanted }}"
    view: "{{ hs_found.view }}"
  register: hs_run
"""

RETURN = r"""
run_id: {description: Name of the run., type: str, returned: always}
attached: {description: Whether an open run is gone on with., type: bool, returned: always}
"""

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import steps, units  # noqa: E402
from ansible.module_utils.sglang_hs.journal import Journal, Paths  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Begin, or say so."""
    given = module.params
    if module.check_mode:
        journal = Journal.load(Paths(given["state_dir"]))
        return {
            "changed": journal is None,
            "run_id": journal.run_id if journal else "(check)",
            "attached": journal is not None,
            "diff": _diff(given["units"]),
        }
    settings = dict(given["view"]["settings"], bad_rows=given["bad_rows"], shared=bool(given["share"]))
    settings["dataset"] = given["dataset"] or settings["dataset"]
    view = dict(given["view"], settings=settings)
    diff = _diff(given["units"]) if module._diff else []
    begun = steps.begin(
        given["state_dir"],
        view,
        given["wanted"],
        given["operator"],
        given["api_key"] or "",
        given["take_over"],
        given["share"],
        given["units"],
    )
    return dict(begun, diff=diff)


def _diff(wanted: dict) -> list:
    """What the units would be, beside what is there, as Ansible shows it."""
    return [
        {"before_header": one["path"], "after_header": one["path"], "before": one["before"], "after": one["after"]}
        for one in units.differences(wanted)
    ]


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "operator": {"type": "str", "required": True},
            "take_over": {"type": "bool", "default": False},
            "wanted": {"type": "dict", "required": True},
            "view": {"type": "dict", "required": True},
            "bad_rows": {"type": "int", "default": 0},
            "share": {"type": "str", "default": ""},
            "dataset": {"type": "str", "default": ""},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "units": {"type": "dict", "default": {}},
        },
        work,
    )


if __name__ == "__main__":
    main()
