"""From the forward's tensors to samples in their final place: our way, for the comparisons with others. Engine's Python."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_hs_client.dumpfile import Expected
from sglang_hs_client.exchange import Exchange
from sglang_hs_client.output import Output

from . import capture
from .frame import Clock, Figure, Goal, Place, filesystem, rounds

WORKERS = 4  # threads that take samples to their place, of either side: as many prompts as the client has in flight by default
COUNT = 8  # samples of a round
REPEATS = 5


def against(place: Place, whose: str, forward: capture.Forward, theirs: Callable[[], float]) -> Iterator[Figure]:
    """The figures of a comparison, in turns: our dumps in memory, as by default, and on the disk of the output (``hs_dump_dir``)."""

    def mine(scratch: Path) -> Callable[[], float]:
        path = Ours(forward, scratch)
        return lambda: path.take(COUNT, place.disk / "work")

    clocks = [Clock() for _ in range(3)]
    sides = [mine(place.memory), mine(place.disk / "scratch"), theirs]
    times = rounds(REPEATS, *(clock.around(side) for clock, side in zip(clocks, sides, strict=True)), patience=90)
    rates = [[COUNT * forward.size / 1e9 / took for took in side] for side in times]
    told = f"{whose}, to {filesystem(place.disk)}"
    for part, name in enumerate((place.key, f"{place.key}, dumps on the same disk")):
        spent = (clocks[part].each(COUNT), clocks[2].each(COUNT))
        note = "processor time of a sample: {:.2f} s against {:.2f} s".format(*spent)
        yield place.ratio(name, "GB/s", rates[part], rates[2], Goal("at least", 1.0), told, note=note)


class Ours:
    """The shipped capture, set up once as in a server, and the client's verification and move. scratch: where the dumps lie."""

    def __init__(self, forward: capture.Forward, scratch: Path) -> None:
        self.forward, self.scratch = forward, scratch
        self.recorder = capture.recorder(scratch / "dumps")
        self.exchange = Exchange(scratch / "dumps")

    def take(self, count: int, disk: Path) -> float:
        """Seconds for ``count`` samples; the last byte is durable then. They are taken away again."""
        forward, exchange = self.forward, self.exchange
        output, expected = Output(disk / "out"), Expected(4, forward.hidden, "bfloat16", "pre_norm")
        rows = [forward.ids(number) for number in range(count)]
        names = [capture.sequence_name(ids) for ids in rows]
        output.open()
        room = threading.Semaphore(WORKERS + 2)  # the client hands no more on than it can take

        def accept(idx: int) -> None:
            dump = exchange.wait(names[idx], 120)
            output.accept(dump, idx, rows[idx], names[idx], expected)
            exchange.hand_back(names[idx])
            exchange.forget(names[idx])
            room.release()

        began = time.perf_counter()
        with ThreadPoolExecutor(WORKERS) as client:
            accepted = []
            for idx, ids in enumerate(rows):
                room.acquire()
                exchange.wish(names[idx])
                forward.run(self.recorder, ids)
                accepted.append(client.submit(accept, idx))
            for future in accepted:
                future.result()
        took = time.perf_counter() - began
        output.close()
        clean(disk, count, forward.size)
        return took


def clean(disk: Path, count: int, size: int) -> None:
    """Look whether everything arrived, and take it away."""
    found = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size >= size]
    if len(found) != count:
        raise RuntimeError(f"{len(found)} samples instead of {count}")
    shutil.rmtree(disk)
    disk.mkdir()


def durable(folder: Path, work: Callable[[], Any]) -> float:
    """Seconds until the work is done and the file system has its bytes."""
    began = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - began
