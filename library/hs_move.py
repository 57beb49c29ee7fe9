#!/usr/bin/python
"""Ansible module: move what an extraction left on the host to its remote."""

from __future__ import annotations

DOCUMENTATION = r"""
module: hs_move
short_description: Move finished samples from the host to a remote that rclone speaks
description:
  - Starts C(hs move) on the host, in a session of its own and at low priority, and lets go; M(hs_watch) waits for it. One that is at work
    already is left at work.
  - A sample leaves the host only after its bytes were verified at the remote. When all are there, what describes them is put beside them.
  - Refuses while a run is open; when one is opened it ends by itself, and that run's client moves on.
options:
  state_dir: {description: Folder of the journal and of the installed programs on the host., type: path, required: true}
  output_dir: {description: Folder that the extraction wrote; empty for the last run's., type: str, default: ''}
  settings:
    description: How to move - to, rclone, config, options, high_water, verify, archive, archive_bytes; what is empty is taken from the folder's book.
    type: dict
    default: {}
attributes:
  check_mode: {support: full, description: Says how many samples wait.}
author: sglang-hidden-states contributors
"""

EXAMPLES = r"""
- name: Move the samples
  hs_move:
    state_dir: /var/lib/sglang-hs
    output_dir: /data/hidden-states
    settings: {to: 'store:bucket/hidden-states', config: /etc/sglang-hs/rclone.conf}

- name: Wait for it
  hs_watch: {what: move, state_dir: /var/lib/sglang-hs}
"""

RETURN = r"""
waiting: {description: Samples that were on the host., type: int, returned: always}
moved: {description: Samples that were at a remote., type: int, returned: always}
line: {description: One line for a person., type: str, returned: always}
"""

from pathlib import Path  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible.module_utils.hs_module import run  # noqa: E402
from ansible.module_utils.sglang_hs import movejob, movesettings, moving, rclone  # noqa: E402
from ansible.module_utils.sglang_hs.errors import HsError  # noqa: E402
from ansible.module_utils.sglang_hs.journal import open_run  # noqa: E402
from ansible.module_utils.sglang_hs.manifest import Manifest  # noqa: E402


def work(module: AnsibleModule) -> dict:
    """Look what waits; start it."""
    given = module.params
    if open_run(given["state_dir"]):
        raise HsError("a run is open on this host", movejob.UNTOUCHED, "let it end (or run restore.yml), then move")
    found = movejob.known(given["state_dir"], given["output_dir"])
    move = dict(found["move"], **{key: value for key, value in given["settings"].items() if value})
    move["archive_bytes"] = int(move.get("archive_bytes") or 1e9)  # templates hand numbers over as text
    if not move.get("to"):
        raise HsError(
            "hs_move_to is empty: the samples of {} move nowhere".format(found["output"]), movejob.UNTOUCHED, "set it"
        )
    move["to"] = movesettings.Move.of({"to": move["to"]}).to
    movesettings.apart(move["to"], found["output"], movejob.UNTOUCHED)
    looked = {"move_to": move["to"], "rclone": move.get("rclone") or "rclone"}
    looked.update(rclone_config=move.get("config") or "", rclone_options=list(move.get("options") or []))
    book = Manifest(Path(found["output"]), read_only=True)
    try:
        known, done = book.moved_counts(), book.counts()["done"]
        moved, there = known["moved"], known["roots"].get(move["to"], 0)
        move["rclone"] = rclone.look(looked, movejob.UNTOUCHED, not module.check_mode, book.mark(), there)["program"]
    finally:
        book.close()
    line = "{:,} samples of {} wait here to go to {}, {}".format(
        done - moved, found["output"], move["to"], moving.where(known["roots"]) or "none was moved yet"
    )
    if not module.check_mode:
        movejob.start_detached(given["state_dir"], found["output"], move)
    return {"changed": done > moved, "waiting": done - moved, "moved": moved, "line": line}


def main() -> None:
    """Entry point."""
    run(
        {
            "state_dir": {"type": "path", "required": True},
            "output_dir": {"type": "str", "default": ""},
            "settings": {"type": "dict", "default": {}},
        },
        work,
    )


if __name__ == "__main__":
    main()
