"""What a sample costs the client beside its bytes, with a thousand samples in the book and with a million.

Samples of eight tokens (16 KB), so that their bytes do not count; a server that answers at once, in a process of its own. What is measured is the
processor time of the client's process, from one hundred accepted samples to the next: reading the row, the wish, the request, looking at every part of the
dump, moving it durably, the book. Once with a book of 1,000 rows, all of them to be done, once with one of 1,000,000 in which all
but the last 1,000 are done. *Memory* is the peak of the client's process in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.frame import Figure, Goal, Place

PYTHON = "engine"
ORDER = 80
LEFT = 1000
STARTS = 3  # of either way to start
FEW, MANY = 1000, 1_000_000


def run(place: Place) -> Iterator[Figure]:
    """Few and many; and resume_scan, on the folder of many."""
    import shutil

    from bench import scale

    spent: dict[int, list[float]] = {}
    peaks: dict[int, float] = {}
    for rows in (FEW, MANY):
        folder = place.disk / str(rows)
        (place.memory / str(rows)).mkdir()
        scale.prepare(folder, place.memory / str(rows), rows, LEFT)
        if rows == MANY:
            yield from starts(place.also("resume_scan"), folder)
        marks, peaks[rows] = scale.measure(folder, "work")
        times = list(marks.values())
        spent[rows] = [
            10 * (after - before) for before, after in zip(times, times[1:], strict=False)
        ]  # ms of one in 100
        shutil.rmtree(folder)
    yield place.absolute(
        "client_per_sample, beside the bytes", "ms", spent[MANY], Goal("at most", 1.0), note="processor time"
    )
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
