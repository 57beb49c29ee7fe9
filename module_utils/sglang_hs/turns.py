"""One step of a run at a time, none once a restore has begun, and the record of a step. Small: an edit brings it along to record itself."""

from __future__ import annotations

import contextlib
from typing import Iterator

from . import fsio
from .errors import HsError
from .journal import Journal, Paths

TURN = 30.0  # seconds that a step waits for the one before it


def forward(paths: Paths, run_id: str) -> Journal:
    """The open run, if it may go forward."""
    journal = Journal.require(paths, run_id)
    if journal.restoring:
        raise being_restored(journal)
    return journal


def being_restored(journal: Journal) -> HsError:
    """What a forward step says that comes too late; with the restore's own reason, which may be that the window closed."""
    why = [record["detail"] for record in journal.document["steps"] if record["step"] == "restore"]
    return HsError(
        "a restore of run {} has begun ({}); no step goes forward any more".format(journal.run_id, why[0]),
        "production, which is on its way back",
        "wait for the restore, then start playbooks/extract.yml again",
    )


@contextlib.contextmanager
def turn(paths: Paths) -> Iterator[None]:
    """Hold the steps' mutex. Raises HsError with the reason of a restore that holds it: that takes as long as production loads."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(fsio.mutex(paths.mutex, TURN))
        except HsError:
            journal = Journal.load(paths)
            if journal is not None and journal.restoring:
                raise being_restored(journal) from None
            raise
        yield


def note(state_dir: str, run_id: str, step: str, state: str, detail: str, lease: float) -> None:
    """A record for a step that Ansible itself does (the edit)."""
    paths = Paths(state_dir)
    with turn(paths):
        forward(paths, run_id).record(step, state, detail, lease)
