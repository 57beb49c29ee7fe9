"""What the playbooks take by themselves, on a real systemd host over ssh: extract.yml without the engines' loading and the data, and restore.yml
where nothing is to be restored.

The host is the one of the fault matrix: booted from this machine's disk, with a real SGLang as a unit of systemd and the tiny model. *extract*: from the
shell's point of view, less the seconds in which an engine loads (until it says itself that it is ready) and in which the client is alive. A host's very
first run has SGLang print its options, which takes it as long as it imports itself; that run is told apart, in the note.
*restore*: all of it. The host is this machine's, so the link has no latency; the notes have the number of ssh commands, each of which costs
a round trip.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 120
RUNS = 3
LIMIT = """
Production's own end. SGLang looks every five seconds whether it was told to end (`sigterm_watchdog`), and takes its processes down after that; it is not
killed before, for whoever still waits for an answer from it. The note has what the engines' ends take. The rest are
the ssh commands that it counts, nearly all of each the start of Python and of Ansible's module code on the host.
"""
RESTORES = 5


def run(place: Place) -> Iterator[Figure]:
    """Both playbooks, and downtime, of the same whole runs."""
    from bench import control

    with control.host() as host:
        first = control.extraction(host)
        parts = [control.extraction(host) for _ in range(RUNS)]
        slowest = control.Played(0, 0, host.task_lines(), 0).longest(3)
        restored = [host.timed("playbooks/restore.yml") for _ in range(RESTORES)]
    last = parts[-1]
    ends, stop = (statistics.median(values) for values in zip(*((part.ends, part.stop) for part in parts), strict=True))
    rest = statistics.median(part.wall - part.engines - part.stop for part in parts)
    words = [
        f"{last.tasks} tasks, {last.trips} ssh commands",
        f"both engines' ends, which are counted, take {ends:.1f} s, production's alone {stop:.1f} s; without that one it is {rest:.1f} s",
    ]
    words += [
        f"the first run on this host, in which SGLang printed its options, took {first.wall - first.engines:.1f} s"
    ]
    words += [
        "longest in the last run, with what is waited for in them: "
        + ", ".join(f"{name} {took:.1f} s" for name, took in slowest)
    ]
    extracted = [part.wall - part.engines for part in parts]
    yield place.absolute("control_plane, extract", "s", extracted, Goal("at most", 15.0), note="; ".join(words))
    beyond = [part.down - part.engines for part in parts]
    down, engines = (
        statistics.median(values) for values in zip(*((part.down, part.engines) for part in parts), strict=True)
    )
    told = f"down for {down:.0f} s, of which {engines:.0f} s load and extract; both engines' ends take {ends:.1f} s of the rest"
    yield place.also("downtime").absolute("downtime", "s", beyond, Goal("at most", 10.0), note=told)
    note = f"{len(restored[-1].tasks) - 1} tasks, {restored[-1].trips} ssh commands; {restored[-1].before:.1f} s until the first task"
    yield place.absolute("control_plane, restore", "s", [one.wall for one in restored], Goal("at most", 4.0), note=note)
