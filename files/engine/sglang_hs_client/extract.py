"""The data set through the server: keeps it busy, verifies and files what comes back, retries, and stops when it must."""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterable, List, Optional

from sglang_hs.dataset import Row
from sglang_hs.manifest import DONE, FAILED, PENDING, Manifest, Sample
from sglang_hs.moving import Mover, remove
from sglang_hs.plan import MOVERS

from .dumpfile import Expected, Header, check_data, check_header, prompts_in_forward
from .exchange import Exchange
from .faults import NoRoom, OutputFault, SampleFault, ServerGone
from .gate import Gate
from .norms import measure
from .output import Output, book_fault, file_name
from .server import Server
from .spec import Spec

ROOM_PAUSE = 1.0  # seconds between two looks whether the dump folder has room again


@dataclass
class Tally:
    """Running counts for the progress file, so that no tick has to ask the whole book."""

    counts: Dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **changes: float) -> None:
        """Add to some counts; a prompt that shared its forward adds its part of one."""
        with self.lock:
            for key, change in changes.items():
                self.counts[key] = self.counts.get(key, 0) + change

    def snapshot(self) -> Dict[str, int]:
        """The counts as whole numbers."""
        with self.lock:
            return {key: round(count) for key, count in self.counts.items()}


@dataclass(frozen=True)
class Halt:
    """Why work was stopped before its end. outcome: window, stopped, error_budget or failed."""

    outcome: str
    message: str
    left: str = ""


class Extraction:
    """One pass over the pending rows. ``halt`` holds the reason once no new work is to be taken."""

    def __init__(
        self,
        spec: Spec,
        server: Server,
        exchange: Exchange,
        output: Output,
        manifest: Manifest,
        expected: Expected,
        tally: Tally,
    ) -> None:
        self.mover: Optional[Mover] = None  # set by whoever moves finished samples on
        self.held_s = 0.0  # seconds in which no prompt was given out for want of room
        self.holding: Optional[float] = None  # since when (unix time) that is so now
        self._promised: Dict[int, int] = {}  # row at work -> bytes that it will take
        self.spec = spec
        self.server = server
        self.exchange = exchange
        self.output = output
        self.manifest = manifest
        self.expected = expected
        self.tally = tally
        self.halt: Optional[Halt] = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._twins: Dict[str, List[int]] = {}  # name of a sequence at work -> further samples with the same tokens
        self._rows: "queue.Queue[Optional[Row]]" = queue.Queue(maxsize=spec.in_flight)
        self._gate = Gate(spec.in_flight, spec.tokens_in_flight)
        self._outage: Optional[float] = None
        self._no_room: Optional[float] = None

    def stop(self, halt: Halt) -> None:
        """Take no more work; what is in flight is finished. The first reason counts."""
        with self._lock:
            self.halt = self.halt or halt
        self._stop.set()

    def run(self, rows: Iterable[Row]) -> None:
        """Extract every row whose sample is pending."""
        threads = [
            threading.Thread(target=self._work, name="sample-{}".format(number), daemon=True)
            # beyond the prompts in flight: while one's dump is verified and moved, another's is computed
            for number in range(self.spec.in_flight + min(self.spec.in_flight, MOVERS))
        ]
        for thread in threads:
            thread.start()
        try:
            for row in rows:
                if self._closed() or not self._room_for(row):
                    break
                self._hand_out(row)
        except OutputFault as fault:
            self.stop(Halt("failed", str(fault.what), str(fault.left)))
        finally:
            for _ in threads:
                self._put(None)
            for thread in threads:
                thread.join()
            self.manifest.commit()

    def _closed(self) -> bool:
        end = self.spec.stop_taking_work_at
        if end is not None and time.time() >= end:
            self.stop(
                Halt(
                    "window",
                    "the window closed before the data set was through",
                    "what is done stays; the next run goes on from there",
                )
            )
        return self._stop.is_set()

    def _room_for(self, row: Row) -> bool:
        """Wait until the high-water mark allows one more sample; False where the run is to take no more work meanwhile."""
        mover = self.mover
        if mover is None:
            return True
        need = self.expected.bytes(len(row.input_ids))
        try:
            while True:
                with self._lock:
                    promised = sum(self._promised.values())
                if mover.room(promised) >= need:
                    break
                if not promised and mover.idle():  # everything is moved, and still there is no room
                    raise OutputFault(
                        "a sample of {} tokens does not fit below hs_move_high_water ({}) in {}, although nothing waits there".format(
                            len(row.input_ids), mover.move.high_water, self.output.folder
                        ),
                        "the samples that are done; each is whole",
                        "make room there, or raise hs_move_high_water, and run again: it goes on where it stopped",
                    )
                refused = mover.refused
                if refused is not None:  # production is down meanwhile, and no time mends that
                    raise OutputFault(refused.what, "the samples that are done; each is whole", refused.next)
                if self.holding is None:
                    self.holding = time.time()
                    mover.hurry(True)
                if self._closed() or self._stop.wait(0.2):
                    return False
        finally:
            if self.holding is not None:
                self.held_s += time.time() - self.holding
                self.holding = None
                mover.hurry(False)
        with self._lock:
            self._promised[row.idx] = need
        return True

    def release(self, sample: Sample, path: Path) -> bool:
        """Remove the file of a sample that was moved, unless an equal sample is about to be given its bytes."""
        with self._lock:
            return sample.name not in self._twins and remove(path)

    def _hand_out(self, row: Row) -> None:
        if not self._taken(row):
            with self._lock:
                self._promised.pop(row.idx, None)

    def _taken(self, row: Row) -> bool:
        """Whether the row goes to the server; else it is done, or waits for its twin."""
        known = self.manifest.sample(row.idx)
        if known is None or known.state != PENDING:
            return False
        name = row.name
        with self._lock:
            if name in self._twins:
                self._twins[name].append(row.idx)
                return False
            twin = self.manifest.done_as(name)
            self._twins[name] = []  # as long as it stands there, nobody takes the twin's file away
        if twin is not None and twin.file is not None:
            try:
                self._share(twin.idx, row.idx)
            finally:
                self._pop_twins(name)
            return False
        return self._put(row)

    def _put(self, row: Optional[Row]) -> bool:
        while True:
            try:
                self._rows.put(row, timeout=0.5)
                return True
            except queue.Full:
                if row is not None and self._closed():
                    with self._lock:
                        self._twins.pop(row.name, None)
                    return False

    def _share(self, source: int, idx: int) -> None:
        """Sample ``idx`` has the tokens of the finished sample ``source``: the same bytes under its own name."""
        found = self.manifest.sample(source)
        if found is None or found.state != DONE or found.file is None or found.bytes is None or found.sha256 is None:
            return
        file = self.output.share(found.file, idx)
        self.manifest.done(idx, file, found.bytes, found.sha256, 0, self.manifest.norms_of(source))
        self.tally.add(done=1, tokens_done=found.length, bytes_done=found.bytes, shared=1)
        if self.mover is not None:
            self.mover.offer(idx, found.bytes)

    # -- worker threads ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            row = self._rows.get()
            if row is None:
                return
            if self._stop.is_set():
                with self._lock:
                    self._promised.pop(row.idx, None)
                continue
            try:
                self._sample(row)
            except OutputFault as fault:
                self.stop(Halt("failed", fault.what, fault.left))
            except sqlite3.Error as error:
                told = book_fault(error, self.output.folder)
                self.stop(Halt("failed", told.what, told.left))
            except ServerGone as gone:
                self.stop(Halt("failed", str(gone), "what is done stays; the sample stays pending"))
            except Exception as error:
                self.stop(
                    Halt("failed", "the client failed at sample {}: {!r}".format(row.idx, error), "what is done stays")
                )
            finally:
                with self._lock:
                    self._promised.pop(row.idx, None)
                with contextlib.suppress(OSError):
                    self.exchange.forget(row.name)

    def _sample(self, row: Row) -> None:
        name = row.name
        if self._adopt(row, name):
            return
        fault = SampleFault("not tried")
        for attempt in range(1, self.spec.retries + 2):
            try:
                dump = self._fetch(row, name, attempt)
                file, header, total = self.output.accept(dump, row.idx, row.input_ids, name, self.expected)
            except SampleFault as error:
                fault = error
                if fault.fatal or attempt > self.spec.retries:
                    break
                if self._stop.wait(min(0.25 * 2**attempt, 10.0)):
                    return  # stays pending
            else:
                self.exchange.hand_back(name)
                self.tally.add(forwards=1 / prompts_in_forward(header))
                self._accepted(row, name, file, header, total, attempt)
                return
        self._give_up(row, name, fault, attempt)

    def _adopt(self, row: Row, name: str) -> bool:
        """A file that a killed client had put in place but not yet entered in the book: enter it if it is right."""
        path = self.output.folder / file_name(row.idx)
        if not path.exists():
            return False
        try:
            header = check_header(path, len(row.input_ids), name, self.expected)
            total = check_data(path, header, row.input_ids)
        except (SampleFault, OSError):
            return False
        self.output.release(row.idx)
        self._accepted(row, name, file_name(row.idx), header, total, 0)
        return True

    def _fetch(self, row: Row, name: str, attempt: int) -> Path:
        """The dump's path: one request, waiting out an outage of the server and a full dump folder."""
        with self._gate.through(len(row.input_ids)):
            while True:
                self.exchange.wish(name)
                rid = "{}-{}".format(name, attempt)
                try:
                    self.server.generate(row.input_ids, rid)
                except ServerGone:
                    self._wait_out()
                    continue
                except SampleFault:
                    self.server.abort(rid)
                    raise
                self._outage = None
                try:
                    dump = self.exchange.wait(name, self.spec.dump_wait_s)
                except NoRoom as full:
                    self._wait_for_room(full)
                    self.exchange.forget(name)
                    continue
                self._no_room = None
                return dump

    def _wait_out(self) -> None:
        """The server is not there: try again for a while, then give up the run (not the sample)."""
        now = time.monotonic()
        with self._lock:
            self._outage = since = self._outage or now
        if now - since > self.spec.outage_s or self._stop.wait(1.0):
            raise ServerGone("the server at {} has been unreachable for {:.0f} s".format(self.spec.server, now - since))

    def _wait_for_room(self, full: NoRoom) -> None:
        """The dump folder is full: others' dumps are taken away, or somebody makes room; after a while give up the run (not the sample)."""
        now = time.monotonic()
        with self._lock:
            self._no_room = since = self._no_room or now
        if now - since > self.spec.outage_s or self._stop.wait(ROOM_PAUSE):
            raise OutputFault(
                "{} (for {:.0f} s)".format(full.reason, now - since),
                "the samples that are done; each is whole",
                "make room there and run again: it goes on where it stopped",
            )

    def _accepted(
        self,
        row: Row,
        name: str,
        file: str,
        header: Header,
        total: str,
        attempt: int,
    ) -> None:
        size, norms = header.size, measure(self.output.folder / file, header)
        self.manifest.done(row.idx, file, size, total, attempt, norms)
        self.tally.add(done=1, tokens_done=len(row.input_ids), bytes_done=size)
        while True:
            with self._lock:
                twins = self._twins.get(name)
                if not twins:
                    self._twins.pop(name, None)
                    break
                idx = twins.pop(0)
            self._share(row.idx, idx)
        if self.mover is not None:
            self.mover.offer(row.idx, size)

    def _pop_twins(self, name: str) -> List[int]:
        with self._lock:
            return self._twins.pop(name, [])

    def _give_up(self, row: Row, name: str, fault: SampleFault, attempts: int) -> None:
        dump = self.exchange.folder / "done" / (name + ".safetensors")
        for idx in [row.idx, *self._pop_twins(name)]:
            self.output.quarantine(
                idx, fault.reason, {"name": name, "tokens": len(row.input_ids), "attempts": attempts}, dump
            )
            self.manifest.failed(idx, fault.reason, attempts)
            self.tally.add(failed=1, quarantined=1)
        spent = self.tally.snapshot()["quarantined"]
        if spent > self.spec.error_budget:
            self.stop(
                Halt(
                    "error_budget",
                    budget_message(self.manifest, self.spec.error_budget, spent),
                    "what is done stays; the rest is pending",
                )
            )


def budget_message(manifest: Manifest, budget: int, spent: int, shown: int = 5) -> str:
    """The list that the operator needs: the first few samples and their reasons."""
    lines: List[str] = []
    for state in (FAILED, "bad"):
        for sample in manifest.samples(state, page=shown):
            if len(lines) == shown:
                break
            lines.append("row {}: {}".format(sample.idx, sample.reason))
    more = " and {} more".format(spent - len(lines)) if spent > len(lines) else ""
    return "{} samples failed, {} may (error_budget): {}{}".format(spent, budget, "; ".join(lines), more)
