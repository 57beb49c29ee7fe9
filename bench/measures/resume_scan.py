"""The start on an output folder of a million finished samples.

*Plan* is what `hs_scan` does before anything is stopped: every row of the data set read and checked, every sample's file looked for in its size.
*Client* is the client from its start to the moment in which it would send the first prompt, with one sample of the million left. The files are
sparse: a real header, then a hole.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.frame import Figure, Goal, Place

PYTHON = "engine"
ORDER = 90
ROWS = 1_000_000
REPEATS = 3


def run(place: Place) -> Iterator[Figure]:
    """Both."""
    from bench import scale

    folder = place.disk / "million"
    scale.prepare(folder, place.memory, ROWS, 1)
    looked, started = [], []
    for _ in range(REPEATS):
        seconds, _ = scale.measure(folder, "scan")
        if seconds["left"] != 1:
            raise RuntimeError(f"{seconds['left']} samples are left")
        looked.append(seconds["look"])
        started.append(scale.measure(folder, "resume")[0]["until the first request"])
    yield place.absolute("resume_scan, plan", "s", looked, Goal("at most", 5.0))
    yield place.absolute("resume_scan, client", "s", started, Goal("at most", 5.0))
