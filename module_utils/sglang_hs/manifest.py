"""The book of an output folder: one row per sample in SQLite, and to which data set, model and settings the folder belongs.

The rollback journal, not WAL: outputs lie on network file systems as often as not, where WAL's shared memory does not work; there
is one writer (the client holds the folder's lock), and commits are grouped, so WAL would buy nothing.
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .errors import HsError

FILE = "manifest.sqlite"
SAMPLES = "samples.jsonl"  # beside it once the client came to its end: tokens and loss masks

PENDING, DONE, FAILED, BAD = "pending", "done", "failed", "bad"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    idx INTEGER PRIMARY KEY,        -- the data set's row number
    name TEXT,                      -- sha256 of the token ids (NULL for a bad row)
    length INTEGER NOT NULL,        -- tokens
    state TEXT NOT NULL,            -- pending | done | failed (by the server or the capture) | bad (the row itself)
    file TEXT,                      -- relative to the output folder
    bytes INTEGER,
    sha256 TEXT,                    -- of the file
    reason TEXT,
    attempts INTEGER NOT NULL DEFAULT 0,
    added REAL NOT NULL,            -- unix time
    changed REAL NOT NULL           -- unix time
);
CREATE INDEX IF NOT EXISTS samples_name ON samples (name, state);
CREATE INDEX IF NOT EXISTS samples_state ON samples (state, length, bytes);
CREATE TABLE IF NOT EXISTS norms (
    idx INTEGER PRIMARY KEY,        -- the sample
    value BLOB NOT NULL             -- float32, little-endian: mean L2 norm of some rows, one number a state
);
CREATE TABLE IF NOT EXISTS remotes (
    id INTEGER PRIMARY KEY,
    root TEXT NOT NULL UNIQUE       -- remote:path, as hs_move_to named it
);
CREATE TABLE IF NOT EXISTS moved (
    idx INTEGER PRIMARY KEY,        -- a finished sample whose bytes were verified at the remote
    remote INTEGER NOT NULL,
    archive INTEGER,                -- the archive that holds it, NULL: a file of its own, named as in samples.file
    at REAL NOT NULL                -- unix time
);
CREATE INDEX IF NOT EXISTS moved_archive ON moved (archive) WHERE archive IS NOT NULL;
CREATE TABLE IF NOT EXISTS archives (
    id INTEGER PRIMARY KEY,
    remote INTEGER NOT NULL,
    file TEXT NOT NULL,             -- relative to the remote's root
    members TEXT NOT NULL,          -- JSON list of idx, ascending: with the samples' bytes they make the archive's
    bytes INTEGER,                  -- of the archive, once it is moved
    sha256 TEXT,
    state TEXT NOT NULL             -- planned | moved | dropped (a member changed; the remote's file is to go)
);
"""


class Sample(NamedTuple):
    """One row of the book."""

    idx: int
    name: Optional[str]
    length: int
    state: str
    file: Optional[str]
    bytes: Optional[int]
    sha256: Optional[str]
    reason: Optional[str]
    attempts: int
    changed: float  # unix time


def _floats(value: bytes) -> Tuple[float, ...]:
    return struct.unpack("<{}f".format(len(value) // 4), value)


class Moved(NamedTuple):
    """Where a moved sample's bytes are: ``root`` as hs_move_to named it, ``file`` below it, ``archive``: whether that holds others too."""

    root: str
    file: str
    archive: bool


class Archive(NamedTuple):
    """One row of the archives: ``members`` are the samples' idx, ascending; ``bytes`` and ``sha256`` are None until it is moved."""

    id: int
    file: str
    members: Tuple[int, ...]
    bytes: Optional[int]
    sha256: Optional[str]


PLANNED, MOVED, DROPPED = "planned", "moved", "dropped"  # states of an archive

_SELECT = "SELECT idx, name, length, state, file, bytes, sha256, reason, attempts, changed FROM samples "


class Manifest:
    """The open book; usable from several threads of one process. Changes are committed at most ``lag`` seconds later.

    A crash may lose the last changes, never the files: a resume finds the file in place, verifies it and enters it again.
    ``read_only``: for whoever only looks, also while a client is at work; nothing on the disk is touched then.
    """

    def __init__(self, output: Path, lag: float = 0.5, read_only: bool = False) -> None:
        self.path = output / FILE
        self._read_only = read_only
        self._lag = lag
        self._lock = threading.RLock()
        self._since: Optional[float] = None
        where = "{}?mode={}".format(self.path.absolute().as_uri(), "ro" if read_only else "rwc")
        try:
            self._db = sqlite3.connect(where, uri=True, check_same_thread=False, isolation_level=None, timeout=30)
            if read_only:
                self._db.execute("SELECT COUNT(*) FROM meta").fetchone()
            else:
                self._db.execute("PRAGMA journal_mode = DELETE")
                self._db.execute("PRAGMA synchronous = FULL")
                self._db.executescript(_SCHEMA)
            # a book of before there were remotes, which is only read, has none
            found = self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'archives'").fetchone()
            self._moves = found is not None
        except sqlite3.DatabaseError as error:
            raise HsError(
                "{} cannot be opened: {}".format(self.path, error),
                "the output folder as it is",
                "use another output folder, or move this file away (the samples in place are then verified and entered anew)",
            ) from error

    # -- identity ------------------------------------------------------------------------------------------------------

    def claim(self, identity: Mapping[str, Any]) -> bool:
        """Bind a new folder to ``identity``, or check that it is this folder's. Returns whether the folder was new.

        Anything in which they differ is a refusal: mixed states of two models, data sets or boundaries train to garbage.
        """
        with self._lock:
            known = self.identity()
            if not known:
                self.set("identity", dict(identity))
                self.set("begun", time.time())  # a folder that was emptied and used again is not the earlier runs'
                self.commit()
                return True
        wanted = json.loads(json.dumps(dict(identity)))
        other = [key for key in sorted(set(known) | set(wanted)) if known.get(key) != wanted.get(key)]
        if other:
            told = "; ".join(
                "{}: the folder has {}, this run {}".format(key, known.get(key), wanted.get(key)) for key in other
            )
            raise HsError(
                "the output folder {} belongs to another extraction ({})".format(self.path.parent, told),
                "the output folder as it is",
                "choose another output folder, or run with what this one was made with",
            )
        return False

    def identity(self) -> Dict[str, Any]:
        """What :meth:`claim` bound the folder to; empty for a new one."""
        return dict(self.get("identity") or {})

    def get(self, key: str) -> Any:
        """A value of the meta table (JSON types), None if absent."""
        with self._lock:
            found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return json.loads(found[0]) if found else None

    def set(self, key: str, value: Any) -> None:
        """Put a value (JSON types) into the meta table."""
        self._write("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value, sort_keys=True)))

    def mark(self) -> str:
        """What this book is told from every other by, at a remote; made when it is first asked for, "" where the book is only read and has none."""
        with self._lock:
            found = self.get("mark")
            if not found and not self._read_only:
                found = os.urandom(16).hex()
                self.set("mark", found)
                self.commit()
        return str(found or "")

    # -- samples -------------------------------------------------------------------------------------------------------

    def add(self, samples: Iterable[Tuple[int, Optional[str], int, Optional[str]]]) -> None:
        """Enter (idx, name, length, reason) of rows not yet known: pending, or bad where there is a reason."""
        now = time.time()
        with self._lock:
            self._begin()
            self._db.executemany(
                "INSERT OR IGNORE INTO samples (idx, name, length, state, reason, added, changed) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    (idx, name, length, BAD if reason else PENDING, reason, now, now)
                    for idx, name, length, reason in samples
                ),
            )
            self._commit_if_late()

    def done(
        self, idx: int, file: str, size: int, sha256: str, attempts: int = 1, norms: Optional[Sequence[float]] = None
    ) -> None:
        """The sample's file is in its final place: ``size`` in bytes. ``norms``: one number a state, where they were measured."""
        with self._lock:
            self._begin()
            self._db.execute(
                "UPDATE samples SET state = 'done', file = ?, bytes = ?, sha256 = ?, reason = NULL, attempts = ?, changed = ? WHERE idx = ?",
                (file, size, sha256, attempts, time.time(), idx),
            )
            if norms:
                value = struct.pack("<{}f".format(len(norms)), *norms)
                self._db.execute("INSERT OR REPLACE INTO norms VALUES (?, ?)", (idx, value))
            self._commit_if_late()

    def failed(self, idx: int, reason: str, attempts: int = 1) -> None:
        """The sample was given up, and why."""
        self._write(
            "UPDATE samples SET state = 'failed', file = NULL, bytes = NULL, sha256 = NULL, reason = ?, attempts = ?, changed = ? WHERE idx = ?",
            (reason, attempts, time.time(), idx),
        )

    def again(self, idx: int) -> None:
        """The sample must be extracted anew (its file is missing or wrong, here or at the remote)."""
        with self._lock:
            self._begin()
            self._db.execute("DELETE FROM moved WHERE idx = ?", (idx,))
            self._db.execute(
                "UPDATE samples SET state = 'pending', file = NULL, bytes = NULL, sha256 = NULL, reason = NULL, attempts = 0, changed = ? WHERE idx = ?",
                (time.time(), idx),
            )
            self._commit_if_late()

    def retry_failed(self) -> int:
        """A new run tries again what the last one gave up; returns how many."""
        with self._lock:
            self._begin()
            count = self._db.execute(
                "UPDATE samples SET state = 'pending', reason = NULL, attempts = 0 WHERE state = 'failed'"
            ).rowcount
            self.commit()
        return count

    def forget_undone(self) -> None:
        """Only what is finished stays: what is to do is entered anew, as another host may have taken some of it."""
        self._write("DELETE FROM samples WHERE state != 'done'", ())

    def sample(self, idx: int) -> Optional[Sample]:
        """The book's row of a sample."""
        with self._lock:
            found = self._db.execute(_SELECT + "WHERE idx = ?", (idx,)).fetchone()
        return Sample(*found) if found else None

    def done_as(self, name: str) -> Optional[Sample]:
        """A finished sample with the same token ids whose file is still here."""
        with self._lock:
            found = self._db.execute(
                _SELECT + "WHERE name = ? AND state = 'done' AND idx NOT IN (SELECT idx FROM moved) LIMIT 1", (name,)
            ).fetchone()
        return Sample(*found) if found else None

    def norms_of(self, idx: int) -> Optional[Tuple[float, ...]]:
        """The norms of a finished sample, None where none were measured."""
        with self._lock:
            found = self._db.execute("SELECT value FROM norms WHERE idx = ?", (idx,)).fetchone()
        return _floats(found[0]) if found else None

    def norms(self, page: int = 1000) -> Iterator[Tuple[float, ...]]:
        """The norms of each finished sample that has some; a page in memory at a time. A book of before there were norms has none."""
        with self._lock:
            if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'norms'").fetchone():
                return
        select = "SELECT samples.idx, value FROM samples JOIN norms USING (idx) "
        for _, value in self._pages(select, DONE, page):
            yield _floats(value)

    def lengths(self) -> List[Tuple[int, int]]:
        """(tokens, finished samples of that length), ascending: as long as the longest sample at most, however many there are."""
        with self._lock:
            return self._db.execute(
                "SELECT length, COUNT(*) FROM samples WHERE state = 'done' GROUP BY length ORDER BY length"
            ).fetchall()

    def made_between(self, begin: float, end: float) -> Dict[str, int]:
        """Finished samples that were entered from ``begin`` to ``end`` (unix times): {samples, tokens, bytes, retried}."""
        with self._lock:
            found = self._db.execute(
                "SELECT COUNT(*), TOTAL(length), TOTAL(bytes), TOTAL(attempts > 1) FROM samples "
                "WHERE state = 'done' AND changed BETWEEN ? AND ?",
                (begin, end),
            ).fetchone()
        return dict(zip(("samples", "tokens", "bytes", "retried"), map(int, found)))

    def samples(self, state: Optional[str] = None, page: int = 1000) -> Iterator[Sample]:
        """All samples (of one state) by idx, a page in memory at a time."""
        return (Sample(*values) for values in self._pages(_SELECT, state, page))

    def done_files(self, page: int = 1000) -> Iterator[Tuple[int, Optional[str], Optional[int], float, int]]:
        """(idx, file, bytes, changed, length) of each finished sample, by idx: what a look at a million files needs, and no more.

        The file of a sample that was moved is at the remote and need not be here: it is None.
        """
        if not self._moves:
            return self._pages("SELECT idx, file, bytes, changed, length FROM samples ", DONE, page)
        return self._pages(
            "SELECT samples.idx, CASE WHEN moved.idx IS NULL THEN file END, bytes, changed, length "
            "FROM samples LEFT JOIN moved ON moved.idx = samples.idx ",
            DONE,
            page,
            "samples.idx",
        )

    # -- what was moved to a remote --------------------------------------------------------------------------------------

    def waiting(self, page: int = 1000) -> Iterator[Sample]:
        """The finished samples that are still here, by idx, a page in memory at a time."""
        if not self._moves:
            return self.samples(DONE, page)
        select = _SELECT + "LEFT JOIN moved USING (idx) "
        return (Sample(*values) for values in self._pages(select, DONE, page, "idx", "moved.remote IS NULL AND "))

    def remote(self, root: str) -> int:
        """The number that ``root`` has in this book; it gets one where it has none."""
        with self._lock:
            self._begin()
            self._db.execute("INSERT OR IGNORE INTO remotes (root) VALUES (?)", (root,))
            found = self._db.execute("SELECT id FROM remotes WHERE root = ?", (root,)).fetchone()
            self.commit()
        return int(found[0])

    def moved(self, root: str, samples: Iterable[int], archive: Optional[Tuple[int, int, str]] = None) -> None:
        """The bytes of ``samples`` (idx) were verified at ``root``: durable when this returns. ``archive``: its id, bytes and sha256."""
        now, remote = time.time(), self.remote(root)
        with self._lock:
            self._begin()
            self._db.executemany(
                "INSERT OR REPLACE INTO moved SELECT idx, ?, ?, ? FROM samples WHERE idx = ? AND state = 'done'",
                ((remote, archive[0] if archive else None, now, idx) for idx in samples),
            )
            if archive:
                self._db.execute(
                    "UPDATE archives SET state = 'moved', bytes = ?, sha256 = ? WHERE id = ?",
                    (archive[1], archive[2], archive[0]),
                )
            self.commit()

    def moved_to(self, idx: int) -> Optional[Moved]:
        """Where the bytes of a moved sample are, None for one that is here (or nowhere)."""
        if not self._moves:
            return None
        with self._lock:
            found = self._db.execute(
                "SELECT root, COALESCE(archives.file, samples.file), archive IS NOT NULL FROM moved "
                "JOIN samples USING (idx) JOIN remotes ON remotes.id = moved.remote "
                "LEFT JOIN archives ON archives.id = moved.archive WHERE moved.idx = ?",
                (idx,),
            ).fetchone()
        return Moved(found[0], found[1], bool(found[2])) if found else None

    def moved_here(self, page: int = 1000) -> Iterator[Tuple[int, str, int]]:
        """(idx, file, length) of each moved sample, by idx: where its file was before."""
        if self._moves:
            select = "SELECT idx, file, length FROM samples JOIN moved USING (idx) "
            yield from self._pages(select, DONE, page)

    def moved_counts(self) -> Dict[str, Any]:
        """{moved, bytes_moved: of finished samples at a remote; roots: {remote: samples}, archives}. Zeros where nothing was moved."""
        result: Dict[str, Any] = {"moved": 0, "bytes_moved": 0, "roots": {}, "archives": 0}
        if not self._moves:
            return result
        with self._lock:
            rows = self._db.execute(
                "SELECT root, COUNT(*), TOTAL(bytes) FROM moved JOIN samples USING (idx) "
                "JOIN remotes ON remotes.id = moved.remote WHERE state = 'done' GROUP BY root ORDER BY root"
            ).fetchall()
            count = self._db.execute("SELECT COUNT(*) FROM archives WHERE state = 'moved'").fetchone()
        for root, samples, size in rows:
            result["moved"] += samples
            result["bytes_moved"] += int(size)
            result["roots"][root] = samples
        result["archives"] = int(count[0])
        return result

    def plan_archive(self, root: str, prefix: str, members: Sequence[int]) -> Archive:
        """Write down, durably, which samples an archive is to hold before a byte of it is sent: after a kill it is made again, the same."""
        remote, chosen = self.remote(root), tuple(sorted(members))
        with self._lock:
            self._begin()
            number = self._db.execute("SELECT COALESCE(MAX(id), -1) + 1 FROM archives").fetchone()[0]
            file = "{}{:06d}.safetensors".format(prefix, number)
            self._db.execute(
                "INSERT INTO archives (id, remote, file, members, state) VALUES (?, ?, ?, ?, 'planned')",
                (number, remote, file, json.dumps(chosen)),
            )
            self.commit()
        return Archive(number, file, chosen, None, None)

    def archives(self, state: str, root: Optional[str] = None) -> List[Archive]:
        """The archives in ``state`` (of one remote), by id."""
        if not self._moves:
            return []
        with self._lock:
            rows = self._db.execute(
                "SELECT archives.id, file, members, bytes, sha256 FROM archives JOIN remotes ON remotes.id = archives.remote "
                "WHERE state = ? AND (? IS NULL OR root = ?) ORDER BY archives.id",
                (state, root, root),
            ).fetchall()
        return [Archive(row[0], row[1], tuple(json.loads(row[2])), row[3], row[4]) for row in rows]

    def in_archive(self, number: int) -> Tuple[int, ...]:
        """The samples (idx, ascending) whose bytes are in an archive: less than its members where some were extracted again."""
        with self._lock:
            rows = self._db.execute("SELECT idx FROM moved WHERE archive = ? ORDER BY idx", (number,)).fetchall()
        return tuple(row[0] for row in rows)

    def drop_archive(self, number: int, gone: bool = False) -> None:
        """A planned archive is not to be made after all. ``gone``: nothing of it is left at the remote either, so it is forgotten."""
        with self._lock:
            self._begin()
            if gone:
                self._db.execute("UPDATE archives SET state = 'gone', members = '[]' WHERE id = ?", (number,))
            else:
                self._db.execute("UPDATE archives SET state = 'dropped' WHERE id = ?", (number,))
            self.commit()

    def done_rows(self, page: int = 10000) -> Iterator[Tuple[int, Optional[str], int, int, str, bool]]:
        """(idx, file, bytes, length, sha256, moved) of each finished sample, by idx: what a catalogue needs. moved: its bytes are at a remote."""
        select = "SELECT samples.idx, file, bytes, length, sha256, {} FROM samples {}"
        moved = select.format("moved.idx IS NOT NULL", "LEFT JOIN moved ON moved.idx = samples.idx ")
        rows = self._pages(moved if self._moves else select.format("0", ""), DONE, page, "samples.idx")
        return ((*row[:5], bool(row[5])) for row in rows if row[4])

    def _pages(self, select: str, state: Optional[str], page: int, key: str = "idx", more: str = "") -> Iterator[Any]:
        last = -1
        # the plus keeps SQLite off the index of states, by which it would sort all of them for every page
        clause = "WHERE {}{} > ? AND +samples.state = ?".format(more, key) if state else "WHERE idx > ?"
        while True:
            values: List[Any] = [last] + ([state] if state else []) + [page]
            with self._lock:
                found = self._db.execute(select + clause + " ORDER BY {} LIMIT ?".format(key), values).fetchall()
            yield from found
            if len(found) < page:
                return
            last = found[-1][0]

    def longest(self) -> Optional[int]:
        """The first of the longest samples, bad rows aside."""
        with self._lock:
            found = self._db.execute(
                "SELECT idx FROM samples WHERE state != 'bad' ORDER BY length DESC, idx LIMIT 1"
            ).fetchone()
        return int(found[0]) if found else None

    def counts(self) -> Dict[str, int]:
        """total, pending, done, failed, bad; tokens_total (bad rows have none), tokens_done; bytes_done."""
        with self._lock:
            found = self._db.execute(
                "SELECT state, COUNT(*), TOTAL(length), TOTAL(bytes) FROM samples GROUP BY state"
            ).fetchall()
        result = {key: 0 for key in ("total", PENDING, DONE, FAILED, BAD, "tokens_total", "tokens_done", "bytes_done")}
        for state, count, tokens, size in found:
            result["total"] += count
            result[state] += count
            result["tokens_total"] += int(tokens)
            if state == DONE:
                result["tokens_done"] += int(tokens)
                result["bytes_done"] += int(size)
        return result

    # -- transactions --------------------------------------------------------------------------------------------------

    def _write(self, statement: str, values: Tuple[Any, ...]) -> None:
        with self._lock:
            self._begin()
            self._db.execute(statement, values)
            self._commit_if_late()

    def _begin(self) -> None:
        # on a full disk SQLite takes the transaction back by itself: what the crash of the docstring may lose is lost, and the next one begins
        if self._since is None or not self._db.in_transaction:
            self._db.execute("BEGIN IMMEDIATE")
            self._since = time.monotonic()

    def _commit_if_late(self) -> None:
        if self._since is not None and time.monotonic() - self._since >= self._lag:
            self.commit()

    def commit(self) -> None:
        """Make everything entered so far durable."""
        with self._lock:
            if self._since is not None:
                if self._db.in_transaction:
                    self._db.execute("COMMIT")
                self._since = None

    def close(self) -> None:
        """Commit and close; it is closed also where the commit fails."""
        with self._lock:
            try:
                self.commit()
            finally:
                self._db.close()
