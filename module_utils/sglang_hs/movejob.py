"""``hs move``: what an extraction left to be moved goes, beside production that serves again; then its description goes too.

A program of its own session, so that a link that breaks does not end it; it ends by itself when a run is opened on the host, whose own
client then moves on. STATE/move.json tells how it is doing and how it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from . import archive, fsio, moving, procs, rclone, spawn, watching
from .errors import HsError
from .journal import Paths, closed_runs
from .manifest import FILE, MOVED, Manifest
from .movesettings import Move, apart
from .moving import DESCRIPTIONS, Mover, where
from .rclone import Ended, Failed, Rclone

UNTOUCHED = "everything: the samples are where they were"
STATUS, LOG = "move.json", "move.log"
RUN_OPEN = "a run was opened on this host: its own client moves on"


def known(state_dir: str, output_dir: str = "") -> Dict[str, Any]:
    """{output, move}: the output folder (that of the last run unless named) and how its samples move, by its book. HsError where that is not known."""
    output = output_dir
    if not output:
        journals = sorted(closed_runs(Paths(state_dir)), key=lambda document: float(document["opened"]))
        output = str(journals[-1]["settings"].get("output_dir") or "") if journals else ""
    if not output or not (Path(output) / FILE).is_file():
        raise HsError(
            "{} holds no extraction".format(output) if output else "no run is known on this host",
            UNTOUCHED,
            "name the output folder with --output (hs_output_dir)",
        )
    book = Manifest(Path(output), read_only=True)
    try:
        move = book.get("move") or {}
    finally:
        book.close()
    return {"output": output, "move": move}


def run(state_dir: str, output_dir: str, move: Mapping[str, Any], period: float = 1.0) -> Dict[str, Any]:
    """Move all that waits in ``output_dir`` and describe it at the remote; returns the last status. HsError where it is refused.

    A remote that fails is tried again for ever: whoever does not want that ends this program. SIGTERM ends it at once and loses nothing.
    """
    paths, output = Paths(state_dir), Path(output_dir)
    if not move.get("to"):
        raise HsError("the samples of {} move nowhere".format(output), UNTOUCHED, "set hs_move_to, or give --to")
    chosen = Move.of(move)
    apart(chosen.to, str(output), UNTOUCHED)
    rclone.check(chosen.to, chosen.config, chosen.options, UNTOUCHED)
    if paths.journal.exists():
        raise HsError(
            "a run is open on this host", UNTOUCHED, "let it end: its client moves what it can, then move the rest"
        )
    ended = {"signal": 0}

    def on_signal(number: int, frame: Any) -> None:
        ended["signal"] = number

    def why() -> str:
        """Why to end before all is there; "" where it goes on."""
        if paths.journal.exists():
            return RUN_OPEN
        return "ended by {}".format(signal.Signals(ended["signal"]).name) if ended["signal"] else ""

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    lock = _lock(output)
    try:
        book = Manifest(output)
        settings = dict(chosen._asdict(), options=list(chosen.options))
        if book.get("move") != settings:  # a book that says the same is the same file, and is not sent again
            book.set("move", settings)
            book.commit()
        mover = Mover(output, book, chosen)
        describer = _Describer(output, book, chosen, mover)
        try:
            mover.start(drain=True)
            while not mover.join(period):
                _tell(paths, output, mover.status())
                if why():
                    break
            else:
                describer.start()
                while describer.is_alive():
                    describer.join(period)
                    _tell(paths, output, dict(mover.status(), **describer.failing))
                    if why():
                        break
            if why():
                mover.stop()
                line = why()
                return _tell(paths, output, mover.status(), finished=True, failed=line != RUN_OPEN, line=line)
            if describer.fault is not None:
                raise describer.fault
            status, counts, roots = mover.status(), book.counts(), book.moved_counts()["roots"]
            left = not mover.idle()
        finally:
            mover.stop()
            describer.stop()
            with contextlib.suppress(Exception):
                book.close()
        verified = ", verified by " + status["verified_by"] if status["verified_by"] else ""
        line = where(roots or {chosen.to: 0}, str(output)) + verified
        if status["waiting"]:
            line += "; {:,} are still here".format(status["waiting"])
        elif left:
            line += "; some of their files here could not be removed ({}): start it again".format(status["error"])
        line += "; {:,} are still to be extracted".format(counts["pending"]) if counts["pending"] else ""
        return _tell(paths, output, status, finished=True, failed=left, line=line)
    finally:
        os.close(lock)


class _Describer(threading.Thread):
    """Puts what describes the samples beside them; a remote that fails is tried again, for as long as it takes.

    failing: {failures, failing_since, retry_at, error} while it does. fault: what ended it otherwise.
    """

    def __init__(self, output: Path, book: Manifest, move: Move, mover: Mover) -> None:
        super().__init__(name="describe", daemon=True)
        self.failing: Dict[str, Any] = {}
        self.fault: Optional[Exception] = None
        self._words = (output, book, move, mover)
        self._tool = Rclone(move.rclone, move.config, move.options)
        self._ended = threading.Event()

    def run(self) -> None:
        """Until it is there."""
        pause, count, since = moving.FIRST_PAUSE, 0, time.time()
        while not self._ended.is_set():
            try:
                _describe(*self._words, self._tool, 1 + count)
                return
            except Ended:
                return
            except Failed as error:
                count += 1
                told = {"failures": count, "failing_since": since, "retry_at": time.time() + pause}
                self.failing = dict(told, error=str(error)[:400])
                print("move: {}; tried again".format(error), flush=True)
                self._ended.wait(pause)
                pause = min(2 * pause, moving.LONGEST_PAUSE)
            except Exception as error:
                self.fault = error
                return

    def stop(self) -> None:
        """End at once: a run needs the output folder."""
        self._ended.set()
        self._tool.stop()
        if self.ident is not None:
            self.join(moving.LAST_WORDS)


def _describe(output: Path, book: Manifest, move: Move, mover: Mover, tool: Rclone, attempt: int) -> None:
    """Put what describes the samples beside them, each file verified: a trainer's reader finds there what it found here."""
    archives = []
    for found in book.archives(MOVED, move.to):
        here = book.in_archive(found.id)
        if here:
            archives.append(found._replace(members=here))
        else:  # every sample of it was extracted again
            book.drop_archive(found.id)
    mover.drop_archives()
    if archives:
        inside = {idx for found in archives for idx in found.members}
        # those that moved before there were archives
        others = [idx for idx, _, _ in book.moved_here() if idx not in inside]
        places = ((idx, book.moved_to(idx)) for idx in others)
        single = [idx for idx, place in places if place is not None and place.root == move.to]
        fsio.write_json(output / archive.INDEX, archive.index(archives, single), 0o644)
    book.commit()  # its file is copied, too: whoever has the remote has every checksum
    files = [name for name in (*DESCRIPTIONS, FILE) if (output / name).is_file()]
    # slower than that it hangs; at the next attempt it may be slower
    patience = attempt * (600.0 + sum((output / name).stat().st_size for name in files) / moving.SLOWEST)
    wanted = {name: _sha256(output / name) for name in files}

    def wrong() -> List[str]:
        far = tool.hashes(move.to, files, "sha256", True, patience)
        return [name for name in files if far.get(name) != wanted[name]]

    stale = wrong()
    if stale:
        tool.copy(str(output), move.to, stale, again=True, patience=patience)
        stale = wrong()
    if stale:
        raise Failed("{} at the remote is not what was sent".format(", ".join(stale)))
    moving.settle(move.to, files)


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(archive.BLOCK), b""):
            total.update(block)
    return total.hexdigest()


def _lock(output: Path) -> int:
    """The output folder's lock, as its client holds it."""
    fd = os.open(str(output / ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise HsError("somebody works in {}: its lock is held".format(output), UNTOUCHED, "wait for them") from None
    return fd


def _tell(
    paths: Paths,
    output: Path,
    status: Mapping[str, Any],
    finished: bool = False,
    failed: bool = False,
    line: str = "",
) -> Dict[str, Any]:
    """Write STATUS; the document."""
    document = dict(status, output=str(output), finished=finished, failed=failed, pid=os.getpid(), updated=time.time())
    document["line"] = line or "move: " + watching.SEPARATOR.join(watching.moved_words(status, time.time()))
    with contextlib.suppress(OSError):  # a full disk: the next look says it
        fsio.write_json(paths.state / STATUS, document, 0o644)
    return document


def main(state_dir: str, output_dir: str, given: Mapping[str, Any]) -> int:
    """The verb. ``given``: settings that replace the book's where they are not empty. Exit status: 0 all is there, 1 not."""
    paths = Paths(state_dir)
    try:
        found = known(state_dir, output_dir)
        move = dict(found["move"], **{key: value for key, value in given.items() if value})
        document = run(state_dir, found["output"], move)
    except Exception as error:
        told = isinstance(error, (HsError, Failed))
        line = str(error) if told else "hs move failed: {!r}; start it again, it goes on".format(error)
        if at_work(paths) not in (None, os.getpid()):  # what is told there is of that one
            print(line, flush=True)
            return 1
        document = _tell(paths, Path(output_dir or "?"), {}, finished=True, failed=True, line=line)
    print(document["line"], flush=True)
    return 1 if document["failed"] else 0


# -- from the controller -------------------------------------------------------------------------------------------------


def start_detached(state_dir: str, output_dir: str, move: Mapping[str, Any]) -> bool:
    """Start ``hs move`` in a session of its own unless one is at work; whether one was started. ``move``: settings, {} for the book's."""
    paths = Paths(state_dir)
    if at_work(paths) is not None:
        return False
    spec = paths.state / "move.spec.json"
    fsio.write_json(spec, dict(move))
    with contextlib.suppress(FileNotFoundError):
        (paths.state / STATUS).unlink()
    words = ["move", "--state-dir", state_dir, "--settings", str(spec)] + (
        ["--output", output_dir] if output_dir else []
    )
    # production serves on the same cores, disks and links
    program = spawn.program(paths.lib, *words)
    program["argv"] = ["nice", "-n", "10", *program["argv"]]
    process = spawn.detached(program, str(paths.state / LOG))
    fsio.write_json(paths.state / "move.pid.json", {"pid": process.pid, "start": process.start})
    return True


def at_work(paths: Paths) -> Optional[int]:
    """The pid of the ``hs move`` that :func:`start_detached` began and that runs still, else None."""
    found = fsio.read_json(paths.state / "move.pid.json") or {}
    return int(found["pid"]) if found and procs.alive(found["pid"], found["start"]) else None


def progress(state_dir: str) -> Dict[str, Any]:
    """How it is doing: {finished, failed, phase, line, mood}."""
    paths = Paths(state_dir)
    alive = at_work(paths) is not None
    found = fsio.read_json(paths.state / STATUS) or {}
    if found.get("finished"):
        bad = bool(found["failed"])
        return {"finished": True, "failed": bad, "phase": "done", "line": found["line"], "mood": "bad" if bad else ""}
    if not alive:
        log = paths.state / LOG
        lines: List[str] = log.read_text(errors="replace").splitlines()[-3:] if log.exists() else []
        told = "hs move ended and said nothing of how: {}".format(" | ".join(lines))
        return {"finished": True, "failed": True, "phase": "failed", "line": told, "mood": "bad"}
    failing = bool(found.get("failing_since"))
    return {
        "finished": False,
        "failed": False,
        "phase": "failing" if failing else "moving",
        "line": str(found.get("line") or "move: it starts"),
        "mood": "warn" if failing else "",
    }
