"""What a sample costs the client beside its bytes, with a thousand samples in the book and with a million.

Samples of eight tokens (16 KB), so that their bytes do not count; a server that answers at once, in a process of its own. What is measured is the
processor time of the client's process, from one hundred accepted samples to the next: reading the row, the wish, the request, looking at every part of the
dump, moving it durably, the book. Once with a book of 1,000 rows, all of them to be done, once with one of 1,000,000 in which all
but the last 1,000 are done. *Memory* is the peak of the client's process in both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from bench.frame import Figure, Goal, Place

PYTHON = "engine"
ORDER = 80
LEFT = 1000
LIMIT = """
The note has what the calls alone take that no client could do without (a request of http.client, a durable copy whose bytes are summed twice, its name, the
dump's end, a row of a book), one after the other, in one thread; and what the client's checks take, without which a wrong state would be accepted: a look
for a file that is there already, the header with a checksum of its own against what was asked for, every value's finiteness, the norms that tell a drift, the
book's questions and entries. Both together are more than the goal. The rest is a sample's way through workers that take turns at the interpreter.
"""
STARTS = 3  # of either way to start
FEW, MANY = 1000, 1_000_000


def run(place: Place) -> Iterator[Figure]:
    """Few and many; and resume_scan, on the folder of many."""
    import shutil

    from bench import scale

    spent: dict[int, list[float]] = {}
    peaks: dict[int, float] = {}
    floor, parts = 0.0, ""  # ms
    for rows in (FEW, MANY):
        folder = place.disk / str(rows)
        (place.memory / str(rows)).mkdir()
        scale.prepare(folder, place.memory / str(rows), rows, LEFT)
        if rows == MANY:
            yield from starts(place.also("resume_scan"), folder)
        marks, peaks[rows] = scale.measure(folder, "work")
        times = list(marks.values())
        if rows == FEW:
            least = list(scale.measure(folder, "bare")[0].values())
            floor = statistics.median(10 * (after - before) for before, after in zip(least, least[1:], strict=False))
            parts = ", ".join(f"{told} {took * 1e3 / LEFT:.2f}" for told, took in checked(place).items())
        spent[rows] = [
            10 * (after - before) for before, after in zip(times, times[1:], strict=False)
        ]  # ms of one in 100
        shutil.rmtree(folder)
    note = f"processor time; the bare calls, without any of the client around them, in one thread: {floor:.2f} ms; of the client's checks: {parts} ms"
    yield place.absolute("client_per_sample, beside the bytes", "ms", spent[MANY], Goal("at most", 1.0), note=note)
    count = min(map(len, spent.values()))
    told = "with a thousand in the book"
    yield place.ratio(
        "client_per_sample, a million in the book",
        "ms",
        spent[MANY][:count],
        spent[FEW][:count],
        Goal("at most", 1.2),
        told,
    )
    yield place.ratio("client_per_sample, memory", "MB", [peaks[MANY]], [peaks[FEW]], Goal("at most", 1.2), told)


def checked(place: Place) -> dict[str, float]:
    """Processor seconds of the client's checks, over LEFT samples."""
    from bench import scale

    folder, memory = place.disk / "checks", place.memory / "checks"
    memory.mkdir()
    scale.prepare(folder, memory, FEW, LEFT)
    return scale.measure(folder, "checks")[0]


def starts(place: Place, folder: Path) -> Iterator[Figure]:
    """Again and again on the same folder: neither changes it."""
    from bench import scale

    looked, started = [], []
    for _ in range(STARTS):
        seconds, _ = scale.measure(folder, "scan")
        if seconds["left"] != LEFT:
            raise RuntimeError(f"{seconds['left']} samples are left")
        looked.append(seconds["look"])
        started.append(scale.measure(folder, "resume")[0]["until the first request"])
    yield place.absolute("resume_scan, plan", "s", looked, Goal("at most", 5.0))
    yield place.absolute("resume_scan, client", "s", started, Goal("at most", 5.0))
