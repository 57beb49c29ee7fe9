"""Finished samples move on to a remote while the extraction runs, so that a data set may be larger than the disk.

A batch is copied by rclone; then the remote is asked for checksums, or its bytes are read back, and they are compared with the sha256 that
the book has had of each sample since it was accepted; then the book says durably that the sample is there; only then the file here goes.
Killed at any point it goes on from the book: what was copied and not entered is copied or recognised again, what was entered and
not yet removed is removed.

A remote that fails is tried again after growing pauses, for as long as it takes: no sample is lost for it, and none is to blame.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from . import archive
from .fsio import write_json
from .manifest import DONE, DROPPED, PLANNED, SAMPLES, Archive, Manifest, Sample
from .movesettings import DOWNLOAD, NONE, HighWater, Move
from .rclone import HASHES, Ended, Failed, Rclone, claim

FILES, BYTES = 256, 1 << 30  # of a batch, at most: one is copied while the one before is verified
LINGER = 2.0  # seconds that a batch may wait to become larger
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds, after failures
SLOWEST = 1e6  # bytes a second: a call that is slower than this hangs
DESCRIPTIONS = ("manifest.json", SAMPLES, "data-00000-of-00001.arrow", "dataset_info.json", "state.json", archive.INDEX)


class Parcel(NamedTuple):
    """A file that goes: a sample's own, or an archive of several."""

    file: str
    size: int
    sha256: str
    samples: Tuple[Sample, ...]
    archive: Optional[Archive]


class Mover:
    """Moves the finished samples of ``output``. One copies while the other checks the batch before.

    ``release``: asked for each file that may go; it removes it, or returns False to be asked again later (somebody is about to use it).
    ``spoiled``: told of each sample whose file here turned out damaged and is to be extracted again.
    """

    def __init__(
        self,
        output: Path,
        book: Manifest,
        move: Move,
        release: Optional[Callable[[Sample, Path], bool]] = None,
        spoiled: Optional[Callable[[Sample, str], None]] = None,
        files: int = FILES,
        size: int = BYTES,
    ) -> None:
        self.output = output
        self.book = book
        self.move = move
        self.high_water = HighWater(move.high_water)
        self._release = release or (lambda sample, path: remove(path))
        self._spoiled = spoiled or (lambda sample, reason: None)
        self._files, self._size = files, size
        self._copier = Rclone(move.rclone, move.config, move.options)
        self._checker = self._copier.again()
        self._kind: Optional[str] = DOWNLOAD if move.verify == DOWNLOAD else None
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._queue: Deque[Tuple[int, int]] = deque()  # (idx, bytes) of finished samples that are here
        self._planned: Deque[Archive] = deque()
        self._retry: Deque[Parcel] = deque()
        self._doubted: Set[str] = (
            set()
        )  # files that were wrong at the remote: what lies there is not believed by its size
        self._kept: List[Sample] = []  # moved, but somebody is about to use the file
        self._checks: "queue.Queue[Optional[List[Parcel]]]" = queue.Queue(maxsize=1)
        self._copying = self._checking = 0  # batches at work
        self._hurry = False
        self._drain = False
        self._ready = False
        self._offered = time.monotonic()
        self._threads: List[threading.Thread] = []
        self._status: Dict[str, Any] = {
            "to": move.to, "moved": 0, "bytes_moved": 0, "waiting": 0, "bytes_waiting": 0, "wrong": 0, "failures": 0,
            "failing_since": None, "retry_at": None, "error": "", "verified_by": "", "copied_this_run": 0, "bytes_this_run": 0,
        }  # fmt: skip
        self._resume_at = 0.0
        self._pause = FIRST_PAUSE

    # -- from outside --------------------------------------------------------------------------------------------------

    def start(self, drain: bool = False) -> None:
        """Begin. ``drain``: end by itself when nothing is left."""
        self._drain = self._hurry = drain
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=name, daemon=True)
            for name, work in (("mover", self._copy_all), ("mover-check", self._check_all))
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, idx: int, size: int) -> None:
        """A sample is finished and in the book."""
        with self._lock:
            self._queue.append((idx, size))
            self._offered = time.monotonic()
            self._status["waiting"] += 1
            self._status["bytes_waiting"] += size
            self._lock.notify_all()

    def hurry(self, wanted: bool) -> None:
        """Whether somebody waits for room: then nothing lingers to become a larger batch or a whole archive."""
        with self._lock:
            self._hurry = wanted or self._drain
            self._lock.notify_all()

    def room(self, promised: int) -> int:
        """Bytes that may still be written here beside ``promised`` ones, by the high-water mark."""
        free, total = free_total(self.output)
        with self._lock:
            waiting = self._status["bytes_waiting"]
        making = self.move.archive_bytes if self.move.archive != NONE else 0
        return self.high_water.room(free, total, waiting) - promised - min(making, waiting + promised)

    @property
    def ready(self) -> bool:
        """Whether the remote was reached, and is this output's."""
        return self._ready

    def idle(self) -> bool:
        """Whether nothing is here that could still go."""
        with self._lock:
            return self._ready and not self._status["waiting"] and not self._kept

    def status(self) -> Dict[str, Any]:
        """For progress.json: to, moved, bytes_moved, waiting, bytes_waiting, wrong (files found wrong at the remote), failures in a row,
        failing_since and retry_at (unix times or None), error, verified_by, copied_this_run, bytes_this_run."""
        with self._lock:
            return dict(self._status)

    def stop(self) -> None:
        """End at once, and wait for that: what is not entered as moved stays, and is gone on with by whoever comes next."""
        self._stop.set()
        self._copier.stop()
        self._checker.stop()
        with self._lock:
            self._lock.notify_all()
        self.join()

    def join(self, patience: Optional[float] = None) -> bool:
        """Wait for the end of a mover that drains; whether it came within ``patience`` seconds."""
        until = None if patience is None else time.monotonic() + patience
        for thread in self._threads:
            thread.join(None if until is None else max(until - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in self._threads)

    # -- the two threads -----------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        """Whatever goes wrong is waited out: a mover that ended would hold the extraction for ever."""
        while not self._stop.is_set():
            try:
                work()
                return
            except Ended:
                return
            except Exception as error:
                # an HsError's first part says all, rclone's own words too
                self._failed(getattr(error, "what", "") or "{}: {}".format(type(error).__name__, error))
                self._stop.wait(max(self._resume_at - time.monotonic(), 0.1))

    def _copy_all(self) -> None:
        if not self._ready:
            self._begin()
        while not self._stop.is_set():
            batch = self._take()
            if batch is None:
                self._put_check(None)
                return
            if not batch:
                continue
            try:
                self._copy(batch)
            except Ended:
                self._back(batch)
                return
            except BaseException:
                self._back(batch)
                raise
            with self._lock:
                self._checking += 1
                self._copying -= 1
            self._put_check(batch)

    def _put_check(self, batch: Optional[List[Parcel]]) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._checks.put(batch, timeout=0.2)
                return

    def _check_all(self) -> None:
        while not self._stop.is_set():
            try:
                batch = self._checks.get(timeout=0.2)
            except queue.Empty:
                self._let_go([])
                continue
            if batch is None:
                return
            try:
                self._check(batch)
            except _Again:
                with self._lock:
                    self._checking -= 1
                raise
            except BaseException:
                self._back(batch, checking=True)
                raise
            with self._lock:
                self._checking -= 1
                self._lock.notify_all()

    def _back(self, batch: Sequence[Parcel], checking: bool = False) -> None:
        with self._lock:
            self._retry.extend(batch)
            if checking:
                self._checking -= 1
            else:
                self._copying -= 1
            self._lock.notify_all()

    # -- what is to go -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """What the book says is here; and what a killed mover left: files of samples that are at the remote, half-made archives."""
        claim(self._copier, self.move.to, self.book.mark(), str(self.output))
        known = self.book.moved_counts()
        planned: List[Archive] = []
        for found in self.book.archives(PLANNED, self.move.to):
            samples = [self.book.sample(idx) for idx in found.members]
            whole = all(sample is not None and sample.state == DONE for sample in samples)
            fresh = whole and not any(self.book.moved_to(idx) for idx in found.members)
            if fresh and self.move.archive != NONE:
                planned.append(found)
            else:
                self.book.drop_archive(found.id)
        taken = {idx for found in planned for idx in found.members}
        rows = [(sample.idx, sample.bytes or 0) for sample in self.book.waiting()]
        with self._lock:
            self._planned.extend(planned)
            offered = {idx for idx, _ in self._queue}
            self._queue.extend(row for row in rows if row[0] not in taken and row[0] not in offered)
            sizes = dict(self._queue)
            sizes.update(row for row in rows if row[0] in taken)
            self._status.update(
                moved=known["moved"],
                bytes_moved=known["bytes_moved"],
                waiting=len(sizes),
                bytes_waiting=sum(sizes.values()),
            )
            self._ready = True
        with contextlib.suppress(FileNotFoundError):
            for entry in os.listdir(str(self.output / archive.FOLDER)):
                remove(self.output / archive.FOLDER / entry)
        for idx, file, _ in self.book.moved_here():
            path = self.output / file
            if path.exists():
                place = self.book.moved_to(idx)
                if place is not None and place.root == self.move.to:
                    remove(path)

    def _take(self) -> Optional[List[Parcel]]:
        """The next batch; None at the end of a drain. [] where one had to be given up."""
        batch: List[Parcel] = []
        with self._lock:
            while not self._stop.is_set():
                now = time.monotonic()
                if now < self._resume_at:
                    self._lock.wait(self._resume_at - now)
                    continue
                if self._retry:
                    while self._retry and len(batch) < self._files:
                        batch.append(self._retry.popleft())
                    self._copying += 1
                    break
                enough = self._enough()
                if enough:
                    self._copying += 1
                    break
                busy = self._copying or self._checking
                if self._drain and not self._queue and not self._planned and not busy:
                    return None
                self._lock.wait(0.5)
            else:
                return None
        try:
            return batch or self._gather()
        except BaseException:
            with self._lock:
                self._copying -= 1
            raise

    def _enough(self) -> bool:
        """Whether what waits is worth a batch now."""
        if self._planned:
            return True
        if not self._queue:
            return False
        if self._hurry:
            return True
        if self.move.archive != NONE:
            return sum(size for _, size in self._queue) >= self.move.archive_bytes
        late = time.monotonic() - self._offered >= LINGER
        return late or len(self._queue) >= self._files or sum(size for _, size in self._queue) >= self._size

    def _gather(self) -> List[Parcel]:
        batch: List[Parcel] = []
        if self.move.archive != NONE:
            found = self._archive()
            batch = [found] if found is not None else []
        else:
            chosen: List[Tuple[int, int]] = []
            with self._lock:
                while self._queue and len(chosen) < self._files and sum(size for _, size in chosen) < self._size:
                    chosen.append(self._queue.popleft())
            try:
                samples = [self.book.sample(idx) for idx, _ in chosen]
            except BaseException:
                with self._lock:
                    self._queue.extendleft(chosen)
                raise
            for sample in samples:
                if sample is not None and sample.state == DONE and sample.file and sample.sha256:
                    batch.append(Parcel(sample.file, sample.bytes or 0, sample.sha256, (sample,), None))
        if not batch:
            with self._lock:
                self._copying -= 1
        return batch

    def _archive(self) -> Optional[Parcel]:
        """Make the next archive: one that was planned before, or one of what waits."""
        with self._lock:
            planned = self._planned.popleft() if self._planned else None
            chosen: List[Tuple[int, int]] = []
            size = 0
            while (
                planned is None and self._queue and (not chosen or size + self._queue[0][1] <= self.move.archive_bytes)
            ):
                chosen.append(self._queue.popleft())
                size += chosen[-1][1]
        if planned is None and not chosen:
            return None
        if planned is None:
            planned = self.book.plan_archive(self.move.to, archive.PREFIX, [idx for idx, _ in chosen])
        samples = [sample for sample in map(self.book.sample, planned.members) if sample is not None]
        path = self.output / planned.file
        path.parent.mkdir(exist_ok=True)
        members = [archive.Member(one.idx, self.output / str(one.file), str(one.sha256)) for one in samples]
        try:
            size, total = archive.write(path, members)
        except archive.Spoiled as fault:
            self._dissolve(planned, samples, [one for one in samples if one.idx == fault.idx], fault.reason)
            return None
        except OSError as error:
            remove(path)
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and len(samples) > 1:
                self._halve(planned, samples)
                return None
            with self._lock:
                self._planned.appendleft(planned)
            raise
        return Parcel(planned.file, size, total, tuple(samples), planned)

    def _dissolve(self, planned: Archive, samples: Sequence[Sample], bad: Sequence[Sample], reason: str) -> None:
        remove(self.output / planned.file)
        self.book.drop_archive(planned.id)
        for sample in bad:
            self._damaged(sample, reason)
        with self._lock:
            self._queue.extendleft((one.idx, one.bytes or 0) for one in samples if one not in bad)

    def _halve(self, planned: Archive, samples: Sequence[Sample]) -> None:
        """No room to make it: smaller ones, which free theirs."""
        self.book.drop_archive(planned.id)
        middle = (len(samples) + 1) // 2
        for part in (samples[:middle], samples[middle:]):
            found = self.book.plan_archive(self.move.to, archive.PREFIX, [one.idx for one in part])
            with self._lock:
                self._planned.append(found)

    # -- copying and checking ------------------------------------------------------------------------------------------

    def _copy(self, batch: Sequence[Parcel]) -> None:
        for doubted in (False, True):
            chosen = [parcel for parcel in batch if (parcel.file in self._doubted) == doubted]
            if chosen:
                files = [parcel.file for parcel in chosen]
                self._copier.copy(str(self.output), self.move.to, files, again=doubted, patience=patience(chosen))

    def _check(self, batch: Sequence[Parcel]) -> None:
        """Compare what lies at the remote with the book; enter what is right, and let its files here go."""
        files = [parcel.file for parcel in batch]
        kind, found = self._at_remote(files, patience(batch))
        right: List[Parcel] = []
        wrong: List[Parcel] = []
        missing: List[Parcel] = []
        for parcel in batch:
            value = found.get(parcel.file)
            ours = (
                value == parcel.sha256
                if kind in (DOWNLOAD, "sha256")
                else value is not None and self._same(parcel, kind, value)
            )
            (right if ours else missing if value is None else wrong).append(parcel)
        for parcel in right:
            self._doubted.discard(parcel.file)
        self._enter(right)
        again: List[Parcel] = []
        for parcel in wrong + missing:
            if self._here(parcel):
                again.append(parcel)
        if again:
            with self._lock:
                self._doubted.update(parcel.file for parcel in again)
                self._retry.extend(again)
                self._status["wrong"] += sum(1 for parcel in again if parcel in wrong)
            names = ", ".join(parcel.file for parcel in again[:3])
            what = "has other bytes than were sent" if wrong else "is not there after it was copied"
            raise _Again("{} at the remote {}: {}".format(len(again), what, names))
        self._fine()

    def _at_remote(self, files: Sequence[str], patience: float) -> Tuple[str, Dict[str, str]]:
        """(kind of checksum, file -> value). By the remote's own checksums where it has some that we can compute, else by reading it back."""
        kinds = [self._kind] if self._kind is not None else [*HASHES, DOWNLOAD]
        for kind in kinds:
            download = kind == DOWNLOAD
            found = self._checker.hashes(self.move.to, files, "sha256" if download else kind, download, patience)
            if found or self._kind is not None or download:
                if found:
                    with self._lock:
                        self._kind = kind
                        self._status["verified_by"] = (
                            "reading it back (sha256)" if download else "the remote's {}".format(kind)
                        )
                return kind, found
        raise AssertionError("the last kind always answers")

    def _same(self, parcel: Parcel, kind: str, value: str) -> bool:
        """Whether the file here is the book's, and the remote's: both checksums out of one reading."""
        own, other = hashlib.sha256(), hashlib.new(kind)
        with (self.output / parcel.file).open("rb") as handle:
            for block in iter(lambda: handle.read(archive.BLOCK), b""):
                own.update(block)
                other.update(block)
        return own.hexdigest() == parcel.sha256 and other.hexdigest() == value

    def _here(self, parcel: Parcel) -> bool:
        """Whether the file here is still what the book says; what is not is to be extracted again, or made again."""
        try:
            total = hashlib.sha256()
            with (self.output / parcel.file).open("rb") as handle:
                for block in iter(lambda: handle.read(archive.BLOCK), b""):
                    total.update(block)
            reason = (
                "" if total.hexdigest() == parcel.sha256 else "its bytes have changed since they were accepted (sha256)"
            )
        except FileNotFoundError:
            reason = "its file is gone"
        if not reason:
            return True
        if parcel.archive is None:
            self._damaged(parcel.samples[0], reason)
        else:
            with self._lock:
                self._planned.append(parcel.archive)
        return False

    def _damaged(self, sample: Sample, reason: str) -> None:
        """A sample's file here is not what was accepted: it goes to quarantine, and the sample is extracted again."""
        with self._lock:
            self._status["waiting"] -= 1
            self._status["bytes_waiting"] -= sample.bytes or 0
        self.book.again(sample.idx)
        self.book.commit()
        place = self.output / "quarantine"
        place.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(str(self.output / str(sample.file)), str(place / "hs_{}.safetensors".format(sample.idx)))
        facts = {
            "idx": sample.idx,
            "name": sample.name,
            "tokens": sample.length,
            "found_by": "move",
            "time": time.time(),
        }
        write_json(place / "hs_{}.json".format(sample.idx), dict(facts, reason=reason), 0o644)
        self._spoiled(sample, reason)

    def _enter(self, right: Sequence[Parcel]) -> None:
        """First the book, then the disk."""
        single = [parcel.samples[0].idx for parcel in right if parcel.archive is None]
        if single:
            self.book.moved(self.move.to, single)
        for parcel in right:
            if parcel.archive is not None:
                members = [sample.idx for sample in parcel.samples]
                self.book.moved(self.move.to, members, (parcel.archive.id, parcel.size, parcel.sha256))
                remove(self.output / parcel.file)
        samples = [sample for parcel in right for sample in parcel.samples]
        size = sum(sample.bytes or 0 for sample in samples)
        with self._lock:
            self._status["moved"] += len(samples)
            self._status["bytes_moved"] += size
            self._status["copied_this_run"] += len(samples)
            self._status["bytes_this_run"] += size
            self._status["waiting"] -= len(samples)
            self._status["bytes_waiting"] -= size
        self._let_go(samples)

    def _let_go(self, samples: Sequence[Sample]) -> None:
        """Remove the files of moved samples; those that somebody is about to use stay until he is through."""
        with self._lock:
            kept, self._kept = [*self._kept, *samples], []
        held = [one for one in kept if not self._release(one, self.output / str(one.file))]
        with self._lock:
            self._kept += held

    def drop_archives(self) -> None:
        """Remove at the remote what was planned, perhaps sent, and given up. Failed, Ended as rclone's calls."""
        for found in self.book.archives(DROPPED, self.move.to):
            self._copier.delete(self.move.to, found.file)
            self.book.drop_archive(found.id, gone=True)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _failed(self, text: str) -> None:
        """Wait longer each time, and say since when."""
        with self._lock:
            now = time.time()
            self._status["failures"] += 1
            self._status["failing_since"] = self._status["failing_since"] or now
            self._status.update(error=text[:400], retry_at=now + self._pause)
            self._resume_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._lock.notify_all()
        print("move: {}; tried again".format(text[:400]), flush=True)

    def _fine(self) -> None:
        with self._lock:
            self._status.update(failures=0, failing_since=None, retry_at=None, error="")
            self._pause, self._resume_at = FIRST_PAUSE, 0.0


class _Again(Failed):
    """Part of a batch must go again; the rest of it is entered."""


def remove(path: Path) -> bool:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(path))
    return True


def patience(parcels: Sequence[Parcel]) -> float:
    """Seconds after which a call on these hangs."""
    return 600.0 + sum(parcel.size for parcel in parcels) / SLOWEST


def free_total(folder: Path) -> Tuple[int, int]:
    """(free for us, all) bytes of the file system of ``folder``."""
    info = os.statvfs(str(folder))
    return (info.f_bfree if os.geteuid() == 0 else info.f_bavail) * info.f_frsize, info.f_blocks * info.f_frsize
