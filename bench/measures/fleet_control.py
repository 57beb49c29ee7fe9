"""What the playbooks take by themselves on eight hosts, against one: `extract.yml --check`, which plays each of its steps on every host.

Eight real systemd hosts over real ssh, one data set divided among them. A check runs every step without its change: looks at the host, scans the data set,
tries the edit, begins no run. So neither an engine's loading nor the data is in it, and production is down on purpose (`hs_production_expected: stopped`):
eight idle servers would take this machine's processors. The engine's options are known, as after a first run. The eight hosts' modules run on this machine
too, which no fleet has its controller do: the note has what of the time that is.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.frame import ROOT, Figure, Goal, Place, Watch

PYTHON = "controller"
ORDER = 155
HOSTS = {f"hs-many-{number}": 90 + number for number in range(1, 9)}
REPEATS = 2
# whose command no run on these hosts has seen
DOWN = {
    "hs_production_expected": "stopped",
    "hs_production_argv": "{{ [engine_python] + engine_argv }}",
    "hs_extraction_env": "{{ engine_env }}",
}
LIMIT = """
Processors: eight hosts' modules and one controller share this machine's two. The note has the processor time of the hosts in a run of eight; without what
the other seven take of it the ratio is the last number there. What then is left is the controller's own: a process for each task and host, at about the
same processor time for each.
"""


def run(place: Place) -> Iterator[Figure]:
    """In turns."""
    sys.path.insert(0, str(ROOT))
    import rig
    from sglang_hs import engine

    from tests.fleet_rig import FleetRig

    _, env = rig.production(place.disk, rig.PYTHON, 1, 1)
    asked = engine.Flags(engine.describe(str(rig.PYTHON), env, "/"), env, "/", None)
    flags = json.dumps({"names": sorted(asked.result()), "key": asked.key})
    # the path of an ssh control socket has at most 108 characters
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        fleet = FleetRig(HOSTS, Path(folder), Path(os.environ["HS_CACHE"]))
        try:
            fleet.up(rows=64, production=False)
            for name in HOSTS:
                kept = fleet.place(name, "/var/lib/sglang-hs/flags.json")
                kept.parent.mkdir(mode=0o700)
                kept.write_text(flags)

            def look(*words: str) -> tuple[float, float, float]:
                """Seconds, processor seconds of the controller, and of all others."""
                watch, before, began = Watch(), resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                code, out = fleet.play("extract", "--check", *words, **DOWN)
                took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
                if code:
                    raise RuntimeError(f"extract.yml --check ended with {code}: {out[-4000:]}")
                mine = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                return took, mine, watch.others() * took * (os.cpu_count() or 1)

            first = next(iter(HOSTS))
            found = [(look(), look("--limit", first)) for _ in range(REPEATS + 1)][1:]  # the first warms
        finally:
            fleet.down()
    many, one = ([pair[side][0] for pair in found] for side in (0, 1))
    (_, mine8, hosts8), (_, mine1, _) = found[-1]
    cores = os.cpu_count() or 1
    left = many[-1] - hosts8 * (len(HOSTS) - 1) / len(HOSTS) / cores
    note = (
        f"the last run of eight took {mine8:.1f} s of processor time on the controller (of one: {mine1:.1f} s) and {hosts8:.1f} s on the hosts; "
        f"without that of seven hosts: {left / one[-1]:.2f}x"
    )
    yield place.ratio("fleet_control", "s", many, one, Goal("at most", 1.3), "one host", note=note)
