"""How long production is down beyond what must be: less the extraction server's loading, the extraction, and production's own loading.

On the host of control_plane, from the record before production's SIGTERM to the one after its answers were seen, in the run's journal. An engine's loading ends
when it says that it is ready, the extraction when the client is through; what is left is the stopping of two engines, the steps between, how late their
ends are seen, and the proof that production generates.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 130
RUNS = 3


def run(place: Place) -> Iterator[Figure]:
    """Whole runs."""
    from bench import control

    with control.host() as host:
        parts = [control.extraction(host) for _ in range(RUNS)]
    beyond = [part.down - part.engines for part in parts]
    ends = statistics.median(part.ends for part in parts)
    down, engines = (
        statistics.median(values) for values in zip(*((part.down, part.engines) for part in parts), strict=True)
    )
    note = f"down for {down:.0f} s, of which {engines:.0f} s load and extract; both engines' ends take {ends:.1f} s of the rest"
    yield place.absolute("downtime", "s", beyond, Goal("at most", 10.0), note=note)
