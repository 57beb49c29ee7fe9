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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from . import archive
from .fsio import sync_folder, write_json
from .manifest import DONE, DROPPED, PLANNED, SAMPLES, Archive, Manifest, Sample
from .movesettings import DOWNLOAD, NONE, HighWater, Move
from .rclone import HASHES, OWNER, Ended, Failed, Foreign, Rclone, claim

FILES, BYTES = 1024, 4 << 30  # of a batch, at most: one is copied while the one before is verified
# what does not wait to become larger, in files or bytes: each batch costs two starts of rclone
LEAST_FILES, LEAST = 256, 256 << 20
PARTS = 3  # of what waits, a batch: one is copied, one verified, and one is there when the first is through
MEMBERS = 10000  # samples of an archive: readers of safetensors take a header of 100 MB
# threads that read files here, for checksums that the remote has, too
READERS = max(min(4, (os.cpu_count() or 1) // 2), 1)
LINGER = 2.0  # seconds that a batch may wait to become larger
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds, after failures
SLOWEST = 1e6  # bytes a second: a call that is slower than this hangs, at the first attempt
# seconds that :meth:`Mover.stop` waits: a disk that hangs must not hold whoever wants production back
LAST_WORDS = 20.0
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
        self._least = min(files, LEAST_FILES), min(size, LEAST)
        self._copier = Rclone(move.rclone, move.config, move.options)
        self._checker = self._copier.again()
        self._kind: Optional[str] = DOWNLOAD if move.verify == DOWNLOAD else None
        self._asked = False  # what checksums the remote has
        self._ways: List[str] = []  # how its files were verified, for people
        self._owner: Optional[str] = None  # what stands in OWNER there; None: to be looked at before anything is sent
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._queue: Deque[Tuple[int, int]] = deque()  # (idx, bytes) of finished samples that are here
        self._queued = 0  # bytes in it
        self._known: Set[int] = set()  # every sample that is here and on its way: none goes twice
        self._planned: Deque[Archive] = deque()
        self._retry: Deque[Parcel] = deque()
        # files that were wrong at the remote: what lies there is not believed by its size
        self._doubted: Set[str] = set()
        self._looked: Set[str] = set()  # files that were read here because they could not be copied
        self._kept: List[Sample] = []  # moved, but somebody is about to use the file
        self._checks: "queue.Queue[Optional[List[Parcel]]]" = queue.Queue(maxsize=1)
        self._copying = self._checking = 0  # batches at work
        self._hurry = False
        self._drain = False
        self._ready = False
        self._offered = time.monotonic()
        self.refused: Optional[Foreign] = None  # why nothing will ever go there
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
        """A sample is finished and in the book. One that is known already, because the book was read meanwhile, is not sent twice."""
        with self._lock:
            if idx in self._known:
                return
            self._known.add(idx)
            self._push([(idx, size)])
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
        """End at once, and wait for that, LAST_WORDS at most: what is not entered as moved stays, and whoever comes next goes on with it."""
        self._stop.set()
        self._copier.stop()
        self._checker.stop()
        with self._lock:
            self._lock.notify_all()
        self.join(LAST_WORDS)

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
                self._claim()
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
            if self._ready and not self._asked:  # while the first batch is copied
                self._ask_kind()
            try:
                batch = self._checks.get(timeout=0.2)
            except queue.Empty:
                self._let_go()
                continue
            if batch is None:
                with contextlib.suppress(OSError):  # told before; whoever drains sees by idle() that files are left
                    self._let_go()
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

    def _claim(self) -> None:
        """The remote's folder is this output's, and the one in which its samples are; asked once, and again when that was doubted."""
        if self._owner is None:
            there = self.book.moved_counts()["roots"].get(self.move.to, 0)
            try:
                found = claim(self._copier, self.move.to, self.book.mark(), str(self.output), known=there)
                if os.path.lexists(str(self.output / OWNER)):
                    # by whatever way: each file would be found there, right to the byte, and then removed
                    raise Foreign(
                        "{} is this output folder itself: what was written there stands in {}".format(
                            self.move.to, self.output / OWNER
                        ),
                        "the samples here",
                        "give hs_move_to another place. If that file only came with a copy of the remote, remove it",
                    )
                self._owner = found
            except Foreign as error:
                self.refused = error
                raise
            self.refused = None

    def _begin(self) -> None:
        """What the book says is here; and what a killed mover left: files of samples that are at the remote, half-made archives."""
        self._claim()
        known = self.book.moved_counts()
        planned: List[Archive] = []
        taken: Set[int] = set()
        for found in self.book.archives(PLANNED, self.move.to):
            samples = [self.book.sample(idx) for idx in found.members]
            whole = all(sample is not None and sample.state == DONE for sample in samples)
            fresh = whole and taken.isdisjoint(found.members) and not any(map(self.book.moved_to, found.members))
            if fresh and self.move.archive != NONE:
                planned.append(found)
                taken.update(found.members)
            else:
                self.book.drop_archive(found.id)
        rows = [(sample.idx, sample.bytes or 0) for sample in self.book.waiting()]
        with self._lock:
            # a sample that was finished and offered meanwhile is in both
            fresh_rows = [row for row in rows if row[0] not in self._known]
            offered = [row for row in self._queue if row[0] in taken]
            for row in offered:
                self._queue.remove(row)
                self._queued -= row[1]
            self._known.update(idx for idx, _ in fresh_rows)
            self._planned.extend(planned)
            self._push([row for row in fresh_rows if row[0] not in taken])
            self._status["moved"] = known["moved"]
            self._status["bytes_moved"] = known["bytes_moved"]
            self._status["waiting"] += len(fresh_rows)
            self._status["bytes_waiting"] += sum(size for _, size in fresh_rows)
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

    def _push(self, rows: Sequence[Tuple[int, int]], back: bool = False) -> None:
        """Into the queue; ``back``: to its front, in their order. The lock is held."""
        if back:
            self._queue.extendleft(reversed(rows))
        else:
            self._queue.extend(rows)
        self._queued += sum(size for _, size in rows)

    def _pop(self) -> Tuple[int, int]:
        row = self._queue.popleft()
        self._queued -= row[1]
        return row

    def _forget(self, row: Tuple[int, int]) -> None:
        """It is not on its way any more: it went, or is no finished sample. The lock is held."""
        idx, size = row
        if idx in self._known:
            self._known.discard(idx)
            self._status["waiting"] -= 1
            self._status["bytes_waiting"] -= size

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
                    size = 0
                    while self._retry and len(batch) < self._files and size < self._size:
                        batch.append(self._retry.popleft())
                        size += batch[-1].size
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
            return self._queued >= self.move.archive_bytes or len(self._queue) >= MEMBERS
        late = time.monotonic() - self._offered >= LINGER
        return late or len(self._queue) >= self._least[0] or self._queued >= self._least[1]

    def _gather(self) -> List[Parcel]:
        batch: List[Parcel] = []
        if self.move.archive != NONE:
            found = self._archive()
            batch = [found] if found is not None else []
        else:
            chosen: List[Tuple[int, int]] = []
            size = 0
            with self._lock:
                most = max(self._least[1], min(self._size, self._queued // PARTS))
                while self._queue and len(chosen) < self._files and size < most:
                    chosen.append(self._pop())
                    size += chosen[-1][1]
            try:
                samples = self._to_go(chosen)
            except BaseException:
                with self._lock:
                    self._push(chosen, back=True)
                raise
            batch = [Parcel(str(one.file), one.bytes or 0, str(one.sha256), (one,), None) for one in samples]
        if not batch:
            with self._lock:
                self._copying -= 1
        return batch

    def _to_go(self, rows: Sequence[Tuple[int, int]]) -> List[Sample]:
        """The samples of these rows that are finished and here; of the others nothing waits any more."""
        samples: List[Sample] = []
        others: List[Tuple[int, int]] = []
        for row in rows:
            sample = self.book.sample(row[0])
            whole = sample is not None and sample.state == DONE and sample.file and sample.sha256
            if sample is not None and whole and self.book.moved_to(sample.idx) is None:
                samples.append(sample)
            else:
                others.append(row)
        with self._lock:
            for row in others:
                self._forget(row)
        return samples

    def _archive(self) -> Optional[Parcel]:
        """Make the next archive: one that was planned before, or one of what waits. Where that fails, all of it waits as before."""
        chosen: List[Tuple[int, int]] = []
        size = 0
        with self._lock:
            planned = self._planned.popleft() if self._planned else None
            while planned is None and self._queue and len(chosen) < MEMBERS:
                if chosen and size + self._queue[0][1] > self.move.archive_bytes:
                    break
                chosen.append(self._pop())
                size += chosen[-1][1]
        if planned is None:
            try:
                idxs = [sample.idx for sample in self._to_go(chosen)]
                planned = self.book.plan_archive(self.move.to, archive.PREFIX, idxs) if idxs else None
            except BaseException:
                with self._lock:
                    self._push(chosen, back=True)
                raise
        if planned is None:
            return None
        try:
            return self._make(planned)
        except BaseException:
            with self._lock:
                self._planned.appendleft(planned)
            raise

    def _make(self, planned: Archive) -> Optional[Parcel]:
        """Write the file of ``planned``; None where its samples wait otherwise now."""
        known = [(idx, self.book.sample(idx)) for idx in planned.members]
        samples = self._to_go([(idx, (sample.bytes or 0) if sample is not None else 0) for idx, sample in known])
        if len(samples) < len(planned.members):
            self._dissolve(planned, samples)
            return None
        path = self.output / planned.file
        path.parent.mkdir(exist_ok=True)
        members = [archive.Member(one.idx, self.output / str(one.file), str(one.sha256)) for one in samples]
        try:
            size, total = archive.write(path, members, self._go_on)
        except archive.Spoiled as fault:
            for sample in [one for one in samples if one.idx == fault.idx]:
                self._damaged(sample, fault.reason)
            self._dissolve(planned, [one for one in samples if one.idx != fault.idx])
            return None
        except OSError as error:
            remove(path)
            if error.errno in (errno.ENOSPC, errno.EDQUOT) and len(samples) > 1:
                self._halve(planned, samples)
                return None
            raise
        return Parcel(planned.file, size, total, tuple(samples), planned)

    def _go_on(self) -> None:
        """Ended where nothing is to be gone on with: what reads a large file asks after each block."""
        if self._stop.is_set():
            raise Ended()

    def _dissolve(self, planned: Archive, samples: Sequence[Sample]) -> None:
        """Give ``planned`` up: ``samples``, those of it that can go, wait again."""
        remove(self.output / planned.file)
        self.book.drop_archive(planned.id)
        with self._lock:
            self._push([(one.idx, one.bytes or 0) for one in samples], back=True)

    def _halve(self, planned: Archive, samples: Sequence[Sample]) -> None:
        """No room to make it: smaller ones, which free theirs."""
        self.book.drop_archive(planned.id)
        middle = (len(samples) + 1) // 2
        for part in (samples[:middle], samples[middle:]):
            try:
                found = self.book.plan_archive(self.move.to, archive.PREFIX, [one.idx for one in part])
            except Exception:  # the next archive that is planned meets the same, and tells it
                with self._lock:
                    self._push([(one.idx, one.bytes or 0) for one in part], back=True)
            else:
                with self._lock:
                    self._planned.append(found)

    # -- copying and checking ------------------------------------------------------------------------------------------

    def _patience(self, parcels: Sequence[Parcel]) -> float:
        """Longer after each failure in a row: a link that is slower than SLOWEST gets there, too."""
        return patience(parcels) * (1 + int(self._status["failures"]))

    def _copy(self, batch: List[Parcel]) -> None:
        """Send ``batch``. Where that fails, a file that cannot be read here leaves it: it would fail for ever, and all others with it."""
        try:
            for doubted in (False, True):
                chosen = [parcel for parcel in batch if (parcel.file in self._doubted) == doubted]
                if chosen:
                    files = [parcel.file for parcel in chosen]
                    self._copier.copy(
                        str(self.output), self.move.to, files, again=doubted, patience=self._patience(chosen)
                    )
        except Failed:
            for parcel in [one for one in batch if one.file not in self._looked]:
                self._looked.add(parcel.file)
                if not self._here(parcel):
                    batch.remove(parcel)
            raise

    def _check(self, batch: List[Parcel]) -> None:
        """Compare what lies at the remote with the book; enter what is right, and let its files here go.

        What is dealt with leaves ``batch``: whatever fails afterwards, only the rest goes again.
        """
        if not self._asked:
            self._ask_kind()
        kind = self._kind
        try:
            settle(self.move.to, [parcel.file for parcel in batch])
        except OSError:  # the kernel tells it once, and then calls what it could not write clean
            self._doubted.update(parcel.file for parcel in batch)
            raise
        with ThreadPoolExecutor(READERS) as pool:
            # both checksums of a file here, while the remote computes its own
            sums: Dict[str, "Future[Tuple[str, str]]"] = {}
            try:
                if kind is not None and kind not in (DOWNLOAD, "sha256"):
                    sums = {parcel.file: pool.submit(self._sums, parcel, kind) for parcel in batch}
                found = self._asked_there([parcel.file for parcel in batch], self._patience(batch))
                right = [parcel for parcel in batch if self._right(parcel, found.get(parcel.file), sums)]
            finally:
                for waiting in sums.values():
                    waiting.cancel()
        self._enter(right, batch)
        for parcel in list(batch):
            if not self._here(parcel):
                batch.remove(parcel)
        if batch:
            wrong = sum(1 for parcel in batch if parcel.file in found)
            with self._lock:
                self._doubted.update(parcel.file for parcel in batch)
                self._retry.extend(batch)
                self._status["wrong"] += wrong
            names = ", ".join(parcel.file for parcel in batch[:3])
            what = "has other bytes than were sent" if wrong else "is not there after it was copied"
            raise _Again("{} at the remote {}: {}".format(len(batch), what, names))
        self._fine()

    def _asked_there(self, files: Sequence[str], patience: float) -> Dict[str, Tuple[str, str]]:
        """As :meth:`_at_remote`, after a look at OWNER in the same call: the one file there whose bytes are known without reading any.

        Failed where the remote's folder is not the one that was claimed: a mount point without its disk, or another output's by now.
        """
        found = self._at_remote([OWNER, *files], patience)
        kind, value = found.pop(OWNER, (DOWNLOAD, ""))
        if kind != DOWNLOAD and not self._is_owner(kind, value):
            value = self._checker.hashes(self.move.to, [OWNER], "sha256", True, patience).get(OWNER, "")
            if self._is_owner(DOWNLOAD, value):
                # what the remote calls a checksum is none of the bytes, as in a bucket of S3 that encrypts of its own accord
                kind, self._kind, self._ways = DOWNLOAD, DOWNLOAD, []
                found = self._at_remote(files, patience)
        if not self._is_owner(kind, value):
            self._owner = None  # nothing more is sent before that is mended
            raise Failed(
                "{} at {} is not what it was: is another disk mounted there, or was it removed?".format(
                    OWNER, self.move.to
                )
            )
        return found

    def _is_owner(self, kind: str, value: str) -> bool:
        digest = hashlib.new("sha256" if kind == DOWNLOAD else kind, (self._owner or "").encode())
        return value == digest.hexdigest()

    def _ask_kind(self) -> None:
        """Which checksums the remote itself has that we can compute, too: one call instead of a trial of each."""
        if self._kind is None:
            kinds = self._checker.kinds(self.move.to)
            if kinds is not None:
                self._kind = next((kind for kind in usable() if kind in kinds), DOWNLOAD)
        self._asked = True

    def _at_remote(self, files: Sequence[str], patience: float) -> Dict[str, Tuple[str, str]]:
        """file -> (kind of checksum, value) of those that are there.

        By the remote's own checksums where it has some that we can compute; what it has none of, or whose own cannot be had in this moment,
        is read back.
        """
        found: Dict[str, Tuple[str, str]] = {}
        for kind in [self._kind] if self._kind is not None else usable():
            if kind == DOWNLOAD:
                break
            values = self._checker.hashes(self.move.to, files, kind, False, patience)
            if values:
                self._kind = kind
                self._verified(values, "the remote's {}".format(kind))
                found = {file: (kind, value) for file, value in values.items()}
                break
        rest = [file for file in files if file not in found]
        if rest:
            values = self._checker.hashes(self.move.to, rest, "sha256", True, patience)
            self._verified(values, "reading it back (sha256)")
            if values and not found:
                self._kind = DOWNLOAD
            found.update((file, (DOWNLOAD, value)) for file, value in values.items())
        return found

    def _verified(self, files: Mapping[str, str], way: str) -> None:
        """Note for people how files were verified."""
        if way not in self._ways and any(file != OWNER for file in files):
            self._ways.append(way)
            with self._lock:
                self._status["verified_by"] = " and ".join(self._ways)

    def _right(
        self, parcel: Parcel, found: Optional[Tuple[str, str]], sums: Mapping[str, "Future[Tuple[str, str]]"]
    ) -> bool:
        """Whether the bytes at the remote are those of the book."""
        if found is None:
            return False
        kind, value = found
        if kind in (DOWNLOAD, "sha256"):
            return value == parcel.sha256
        own, other = sums[parcel.file].result() if parcel.file in sums else self._sums(parcel, kind)
        return own == parcel.sha256 and other == value

    def _sums(self, parcel: Parcel, kind: str) -> Tuple[str, str]:
        """(sha256, checksum of ``kind``) of the file here, out of one reading; empty where it cannot be read, which :meth:`_here` tells."""
        own, other = hashlib.sha256(), hashlib.new(kind)
        try:
            with (self.output / parcel.file).open("rb", buffering=0) as handle:
                for block in iter(lambda: handle.read(archive.BLOCK), b""):
                    self._go_on()
                    own.update(block)
                    other.update(block)
        except OSError:
            return "", ""
        return own.hexdigest(), other.hexdigest()

    def _here(self, parcel: Parcel) -> bool:
        """Whether the file here is still what the book says; what is not is to be extracted again, or made again."""
        try:
            total = hashlib.sha256()
            with (self.output / parcel.file).open("rb", buffering=0) as handle:
                for block in iter(lambda: handle.read(archive.BLOCK), b""):
                    self._go_on()
                    total.update(block)
            reason = (
                "" if total.hexdigest() == parcel.sha256 else "its bytes have changed since they were accepted (sha256)"
            )
        except OSError as error:
            if error.errno not in archive.LOST:
                raise
            reason = "its file is gone" if error.errno == errno.ENOENT else "not readable: {}".format(error)
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
            self._forget((sample.idx, sample.bytes or 0))
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

    def _enter(self, right: Sequence[Parcel], batch: List[Parcel]) -> None:
        """First the book, then the disk."""
        single = [parcel for parcel in right if parcel.archive is None]
        if single:
            self.book.moved(self.move.to, [parcel.samples[0].idx for parcel in single])
            self._entered(single, batch)
        for parcel in right:
            if parcel.archive is not None:
                members = [sample.idx for sample in parcel.samples]
                self.book.moved(self.move.to, members, (parcel.archive.id, parcel.size, parcel.sha256))
                self._entered([parcel], batch)
                remove(self.output / parcel.file)
        self._let_go()

    def _entered(self, parcels: Sequence[Parcel], batch: List[Parcel]) -> None:
        """The book has these; whatever happens now, they do not go again."""
        files = {parcel.file for parcel in parcels}
        batch[:] = [parcel for parcel in batch if parcel.file not in files]
        self._doubted.difference_update(files)
        self._looked.difference_update(files)
        samples = [sample for parcel in parcels for sample in parcel.samples]
        size = sum(sample.bytes or 0 for sample in samples)
        with self._lock:
            self._status["moved"] += len(samples)
            self._status["bytes_moved"] += size
            self._status["copied_this_run"] += len(samples)
            self._status["bytes_this_run"] += size
            self._kept += samples
            for sample in samples:
                self._forget((sample.idx, sample.bytes or 0))

    def _let_go(self) -> None:
        """Remove the files of moved samples; those that somebody is about to use stay until he is through.

        OSError where one cannot be removed; it is tried again, as the others are.
        """
        with self._lock:
            kept, self._kept = self._kept, []
        held: List[Sample] = []
        fault: Optional[OSError] = None
        for one in kept:
            try:
                gone = self._release(one, self.output / str(one.file))
            except OSError as error:
                gone, fault = False, error
            if not gone:
                held.append(one)
        with self._lock:
            self._kept += held
        if fault is not None:
            raise fault

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
            self._lock.notify_all()


class _Again(Failed):
    """Part of a batch must go again; the rest of it is entered."""


def remove(path: Path) -> bool:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(path))
    return True


def settle(to: str, files: Sequence[str]) -> None:
    """On another disk of this host a copy is in memory first: it must outlive a power cut before the file here may go. OSError where it does not.

    Of a remote with a name nothing can be asked: what it says it has is there.
    """
    if not to.startswith("/"):
        return
    folders = {Path(to)}
    for file in files:
        path = Path(to) / file
        try:
            fd = os.open(str(path), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # which is told by what asks for its checksum
            continue
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        folders.add(path.parent)
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            sync_folder(folder)


def usable() -> List[str]:
    """Of HASHES, those that this host computes: md5 is none of them where only approved ones are allowed (FIPS)."""
    found: List[str] = []
    for kind in HASHES:
        with contextlib.suppress(ValueError):
            hashlib.new(kind)
            found.append(kind)
    return found


def where(roots: Mapping[str, int], of: str = "") -> str:
    """How many samples (of the folder ``of``) are at which remote, for people. ``roots``: as the book counts them."""
    of = of and " of " + of
    return ", ".join("{:,} samples{} are at {}".format(count, of, root) for root, count in sorted(roots.items()))


def patience(parcels: Sequence[Parcel]) -> float:
    """Seconds after which a call on these hangs."""
    return 600.0 + sum(parcel.size for parcel in parcels) / SLOWEST


def free_total(folder: Path) -> Tuple[int, int]:
    """(free for us, all) bytes of the file system of ``folder``."""
    info = os.statvfs(str(folder))
    return (info.f_bfree if os.geteuid() == 0 else info.f_bavail) * info.f_frsize, info.f_blocks * info.f_frsize
