"""From the forward's tensors to samples in their final place: our way, for the comparisons with others. Engine's Python."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_hs_client.dumpfile import Expected
from sglang_hs_client.exchange import Exchange
from sglang_hs_client.output import Output

from . import capture

WORKERS = 2  # threads of the client here: one a core


def ours(forward: capture.Forward, count: int, memory: Path, disk: Path) -> float:
    """Seconds for ``count`` samples by the shipped capture and the client's verification and move; the last byte is durable then."""
    dumps, output = memory / "dumps", Output(disk / "out")
    recorder = capture.recorder(dumps)
    exchange, expected = Exchange(dumps), Expected(4, forward.hidden, "bfloat16", "pre_norm")
    rows = [forward.ids(number) for number in range(count)]
    names = [capture.sequence_name(ids) for ids in rows]
    output.open()
    # the client's workers wait for room as its queue makes them: as many on their way as it has threads
    room = threading.Semaphore(2 * WORKERS)

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
            forward.run(recorder, ids)
            accepted.append(client.submit(accept, idx))
        for future in accepted:
            future.result()
    took = time.perf_counter() - began
    output.close()
    clean(memory, disk, count, forward.size)
    return took


def clean(memory: Path, disk: Path, count: int, size: int) -> None:
    """Look whether everything arrived, and take it away."""
    found = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size >= size]
    if len(found) != count:
        raise RuntimeError(f"{len(found)} samples instead of {count}")
    for folder in (memory, disk):
        shutil.rmtree(folder)
        folder.mkdir()


def durable(folder: Path, work: Callable[[], Any]) -> float:
    """Seconds until the work is done and the file system has its bytes."""
    began = time.perf_counter()
    work()
    os.sync()
    return time.perf_counter() - began
