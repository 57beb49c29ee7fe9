"""The run's journal on the target: what was begun, what was done, who holds the host, until when.

One folder (root-only, under /var/lib by default) holds all that a restore needs:

    journal.json     this file: absent = no run is open. One record before and one after each step.
    lock             the same run's holder, created exclusively: two operators cannot both have it.
    production.json  how production was started (0600: its environment holds secrets).
    left             a hook took the host out of its load balancer, and none has put it back yet.
    flags.json       the engine's options as it printed them last, so that the next preflight need not wait for them.
    backup/          the engine's file before the edit, with the record that undoes it.
    ballast          room that a restore gives back to itself first, so that a full disk cannot keep it from its records.
    lib/             this program and the engine-side packages.
    runs/ID/         logs, specs, progress and results of one run, and its journal once closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional

from . import fsio
from .errors import HsError

# Between two steps the controller thinks and the link may stutter; past this (hs_controller_patience) the run counts as orphaned.
GRACE = 120.0
BALLAST = 4 << 20
SHARE = "share"  # in a run's folder: the host's part of the data set


def boot_id() -> str:
    """Changes with each boot of the host."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Paths:
    """The state folder's places."""

    def __init__(self, state_dir: str) -> None:
        self.state = Path(state_dir)
        self.journal = self.state / "journal.json"
        self.lock = self.state / "lock"
        self.mutex = self.state / ".mutex"
        self.production = self.state / "production.json"
        self.left = self.state / "left"  # the host is out of its load balancer
        self.flags = self.state / "flags.json"
        self.backup = self.state / "backup"
        self.ballast = self.state / "ballast"
        self.restoring = self.state / ".restore"
        self.lib = self.state / "lib"
        self.runs = self.state / "runs"

    def run(self, run_id: str) -> Path:
        """The folder of one run."""
        return self.runs / run_id

    def make(self) -> None:
        """Create the folders; a link or somebody else's folder is refused.

        Others may pass through the state folder (the engine, as another user, imports its helper from lib/), not look into it.
        """
        if self.state.is_symlink() or (self.state.exists() and not self.state.is_dir()):
            raise HsError(
                "{} is not a plain folder".format(self.state),
                "everything",
                "set hs_state_dir to a folder of its own, e.g. /var/lib/sglang-hs",
            )
        self.state.mkdir(mode=0o711, parents=True, exist_ok=True)
        if self.state.stat().st_uid != os.geteuid():
            raise HsError(
                "{} belongs to another user".format(self.state), "everything", "set hs_state_dir to a folder of its own"
            )
        os.chmod(str(self.state), 0o711)  # noqa: S103 - to pass through, for the engine's user
        for folder in (self.backup, self.runs):
            folder.mkdir(mode=0o700, exist_ok=True)


class Journal:
    """An open run. Every change is written through before the next thing happens."""

    def __init__(self, paths: Paths, document: Dict[str, Any]) -> None:
        self.paths = paths
        self.document = document

    # -- reading -------------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, paths: Paths) -> Optional["Journal"]:
        """The open run of this host, or None."""
        document = fsio.read_json(paths.journal)
        return None if document is None else cls(paths, document)

    @classmethod
    def require(cls, paths: Paths, run_id: str) -> "Journal":
        """The open run ``run_id``; HsError when it was closed meanwhile (by the guard, say) or another one is open."""
        journal = cls.load(paths)
        if journal is None or journal.run_id != run_id:
            closed = fsio.read_json(paths.run(run_id) / "journal.json") or {}
            end = closed.get("closed") or {}
            raise HsError(
                "run {} is no longer open: {}".format(run_id, end.get("why", "it was restored or never begun")),
                "production, which is back; samples accepted so far are kept",
                "start playbooks/extract.yml again: it goes on where the run stopped",
            )
        return journal

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return str(self.document["run_id"])

    @property
    def settings(self) -> Dict[str, Any]:
        """What the operator asked for, resolved."""
        return dict(self.document["settings"])

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return self.paths.run(self.run_id)

    @property
    def patience(self) -> float:
        """Seconds that the controller may be silent between two steps."""
        return float(self.settings.get("controller_patience", GRACE))

    @property
    def holder(self) -> str:
        """Who began the run, where from and when - one line."""
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.document["opened"]))
        return "{} (run {}, begun {})".format(self.document["operator"], self.run_id, began)

    @property
    def load_seconds(self) -> float:
        """Seconds that the extraction server took to load, about what production will take; 0 before it is known."""
        times = {(record["step"], record["state"]): record["at"] for record in self.document["steps"]}
        return max(float(times.get(("launch", "done"), 0)) - float(times.get(("launch", "begun"), 0)), 0.0)

    @property
    def restore_by(self) -> float:
        """Unix time at which a restore must begin, so that production answers before the window's end."""
        return float(self.document["deadline"]) - 1.25 * self.load_seconds

    def last(self, step: str) -> Optional[str]:
        """Last recorded state of ``step``: begun, done, failed; None when never begun."""
        states = [record["state"] for record in self.document["steps"] if record["step"] == step]
        return states[-1] if states else None

    @property
    def restoring(self) -> bool:
        """Whether a restore has begun: from here on no step may go forward."""
        return self.last("restore") is not None

    # -- writing -------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        paths: Paths,
        operator: str,
        view: Mapping[str, Any],
        wanted: Mapping[str, Any],
        production: Mapping[str, Any],
        share: str = "",
    ) -> "Journal":
        """Take the host's lock, keep how production runs, begin a run. Raises HsError naming the holder when somebody has it.

        In this order: a journal without production's record could not bring it back.
        """
        now = time.time()
        run_id = time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + "-" + secrets.token_hex(2)
        document = {
            "version": 1,
            "run_id": run_id,
            "operator": operator,
            "boot_id": boot_id(),
            "opened": now,
            "deadline": now + float(view["settings"]["window_s"]),
            "lease": {"step": "begin", "until": now + float(view["settings"].get("controller_patience", GRACE))},
            "settings": dict(view["settings"]),
            "view": {key: value for key, value in view.items() if key != "flags"},
            "wanted": dict(wanted),
            "steps": [],
        }
        try:
            fd = os.open(str(paths.lock), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise HsError(
                "another run holds this host: {}".format(paths.lock.read_text().strip()),
                "everything",
                "wait for it, or bring production back with playbooks/restore.yml, which also frees the lock",
            ) from None
        try:
            with os.fdopen(fd, "w") as handle:
                handle.write(json.dumps({"operator": operator, "run_id": run_id, "opened": now}) + "\n")
                handle.flush()
                os.fsync(handle.fileno())
            _lay_ballast(paths.ballast)
            fsio.write_json(paths.production, dict(production, run_id=run_id))
            fsio.write_json(paths.flags, view["flags"])
            paths.run(run_id).mkdir(mode=0o700, parents=True)
            if share:
                (paths.run(run_id) / SHARE).write_text(share, encoding="ascii")
            journal = cls(paths, document)
            journal.save()
        except BaseException:
            for path in (paths.ballast, paths.lock):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise
        return journal

    def save(self) -> None:
        """Write through."""
        fsio.write_json(self.paths.journal, self.document)

    def record(self, step: str, state: str, detail: str = "", lease: float = 0.0) -> None:
        """One record; the dead-man's lease now runs for ``lease`` seconds (0: for :attr:`patience`)."""
        now = time.time()
        self.document["steps"].append({"step": step, "state": state, "at": now, "detail": detail})
        self.document["lease"] = {"step": step, "until": now + (lease or self.patience)}
        self.save()

    @contextlib.contextmanager
    def step(self, step: str, lease: float) -> Iterator[None]:
        """Record ``step`` before and after; ``lease``: seconds within which it ends, or the guard restores."""
        self.record(step, "begun", lease=lease)
        try:
            yield
        except BaseException as error:
            self.record(step, "failed", str(error).split("\n")[0][:500])
            raise
        self.record(step, "done")

    def close(self, outcome: str, why: str) -> None:
        """The host is as it was: keep the journal with the run, then free the host (journal first, lock last)."""
        self.document["closed"] = {"at": time.time(), "outcome": outcome, "why": why}
        try:
            fsio.write_json(self.folder / "journal.json", self.document)
        except OSError:  # a full disk: what was written last is kept, without its end; the host is free all the same
            with contextlib.suppress(OSError):
                os.replace(str(self.paths.journal), str(self.folder / "journal.json"))
        for path in (self.paths.journal, self.paths.ballast, self.paths.lock):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        fsio.sync_folder(self.paths.state)


def _lay_ballast(path: Path) -> None:
    """Real blocks on the disk, not a hole. Raises HsError where there is no room for them: then there is none for a run."""
    try:
        fd = os.open(str(path), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, BALLAST)
        finally:
            os.close(fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise HsError(
            "there is no room for the journal in {}: {}".format(path.parent, error),
            "everything",
            "free some MB there, or set hs_state_dir to another disk",
        ) from error


def closed_runs(paths: Paths) -> List[Dict[str, Any]]:
    """Journals of runs that are over, oldest first."""
    if not paths.runs.is_dir():
        return []
    found = (fsio.read_json(folder / "journal.json") for folder in sorted(paths.runs.iterdir()))
    return [document for document in found if document]


def open_run(state_dir: str) -> Dict[str, Any]:
    """The run that is open on this host: {run_id, operator, holder, restoring, settings, ...}; {} when none is."""
    journal = Journal.load(Paths(state_dir))
    if journal is None:
        return {}
    keys = ("run_id", "operator", "opened", "deadline", "view", "wanted")
    return {
        **{key: journal.document.get(key) for key in keys},
        "holder": journal.holder,
        "restoring": journal.restoring,
        "settings": journal.settings,
    }
