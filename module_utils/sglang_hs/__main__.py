"""The program on the target, for the guard, the boot and the operator's shell: ``hs status``, ``hs restore``, ``hs guard``, ``hs move``.

Exit status of ``restore``: 0 production is as it was, 1 it is not (the last lines say what is wrong and what to do). Of ``move``: 0 every
sample is at the remote, 1 not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import List, Optional

from . import fsio, jobs, restore, status
from .errors import HsError

# lib/sglang_hs/__main__.py of the state folder
HOME = Path(__file__).resolve().parent.parent.parent


def _ignore(number: int, frame: object) -> None:
    """A handler, not SIG_IGN: an ignored signal stays ignored in whatever we start, and production must heed its SIGTERM."""


def main(words: Optional[List[str]] = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="hs", description="Bring production back, or say how a run stands.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("status", "say how things stand, change nothing"),
        ("restore", "bring production back and close the run"),
        ("guard", "watch the open run and restore when that is due"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument("--state-dir", default=str(HOME))
        if verb != "guard":
            sub.add_argument("--json", action="store_true", help="one JSON document instead of lines")
        if verb == "restore":
            sub.add_argument("--run-id", default="", help="only if this run is the open one")
            sub.add_argument("--why", default="asked for by hand", help="the reason, for the journal")
            sub.add_argument("--report", default="", help="also write the report to this file")
            sub.add_argument("--dry-run", action="store_true", help="say what is open and what would be done")
        if verb == "guard":
            sub.add_argument("--once", action="store_true", help="one look, then exit (for the timer)")
    sub = verbs.add_parser("move", help="move what an extraction left here to the remote, and describe it there")
    sub.add_argument("--state-dir", default=str(HOME))
    sub.add_argument("--output", default="", help="the output folder (default: the last run's)")
    sub.add_argument("--to", default="", help="another remote:path than the run's")
    sub.add_argument("--settings", default="", help="JSON file with more settings (for the playbook)")
    verbs.add_parser("supervise").add_argument("spec")
    given = parser.parse_args(words)
    try:
        return _run(given)
    except HsError as error:
        print(error, file=sys.stderr)
        return 1
    except PermissionError as error:
        print(
            "{}\nLeft as it was: everything\nNext: run it as the user that the run belongs to, or as root (sudo)".format(
                error
            ),
            file=sys.stderr,
        )
        return 1


def _run(given: argparse.Namespace) -> int:
    if given.verb == "supervise":
        return jobs.supervise(Path(given.spec))
    if given.verb == "move":
        from . import movejob  # nothing of it is needed to bring production back

        settings = fsio.read_json(Path(given.settings)) if given.settings else {}
        return movejob.main(
            given.state_dir, given.output, dict(settings or {}, **({"to": given.to} if given.to else {}))
        )
    if given.verb == "status" or (given.verb == "restore" and given.dry_run):
        found = status.look(given.state_dir)
        print(json.dumps(found, indent=1, sort_keys=True) if given.json else "\n".join(status.lines(found)))
        return 0
    if given.verb == "guard":
        signal.signal(signal.SIGHUP, _ignore)
        if given.once:
            report = restore.guard_once(given.state_dir)
            for line in report.lines + report.failures if report else []:
                print(line)
            return 1 if report and report.failures else 0
        restore.guard(given.state_dir)
        return 0
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)  # a restore that has begun is finished
    begun = time.time()
    report = restore.restore(given.state_dir, given.why, given.run_id)
    document = dict(report.as_dict(), seconds=round(time.time() - begun, 1), pid=os.getpid())
    if given.report:
        with contextlib.suppress(
            OSError
        ):  # a full disk: whoever waits for it sees the journal, and that this has ended
            fsio.write_json(Path(given.report), document)
    if given.json:
        print(json.dumps(document))
    else:
        print("\n".join(report.lines + ["NOT RESTORED: " + failure for failure in report.failures]))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
