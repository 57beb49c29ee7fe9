"""The capture's writer against a raw write of the same bytes.

One sample of 2,048 tokens (4 states of 7,168 in bfloat16, 117 MB) lies in a host buffer. Ours is what the writer's thread does with it: token ids,
header, CRC-32 of the data, temporary name, rename; the file is one that the client has taken and handed back, as all are but the first few.
The other side opens a file in the same folder and gives the kernel the same
buffer in one `write`. Neither syncs: the dump folder is scratch. The figure is the part of the raw rate that the writer reaches, in memory
(`/dev/shm`, where dumps lie by default) and on a disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.frame import Clock, Figure, Goal, Place, filesystem, rounds, seconds

PYTHON = "engine"
ORDER = 10
REPEATS = 25
LIMIT = """
CRC-32 by zlib runs at about the rate of a write, so both together take twice a write's processor time. It is spread over threads (two sums beside the one
write), which takes two free cores for a file system slower than the sum, and three for a faster one. The note of each figure says
what the processor time allows on this machine's cores at best, with nothing else running - not even the forward.
"""


def run(place: Place) -> Iterator[Figure]:
    """Both file systems."""
    from sglang_hs_capture.tensorfile import as_bytes
    from sglang_hs_client.exchange import Exchange

    from bench import capture

    capture.one_thread()
    forward = capture.Forward()

    def measured(base: Path) -> tuple[list[float], list[float], str]:
        """GB/s of the writer and of a raw write, in turns, and what is possible."""
        folder = base / "dumps"
        recorder = capture.recorder(folder)
        held = capture.Held(recorder)
        ids = forward.ids(1)
        sequence = capture.sequence_name(ids)
        exchange = Exchange(folder)
        capture.wish(folder, sequence)
        forward.run(recorder, ids)
        (job,) = held.jobs
        dump, raw = (folder / "done" / name for name in (f"{sequence}.safetensors", "raw"))
        view = as_bytes(job.slot.host)[: forward.size]

        def plain() -> None:
            fd = os.open(raw, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            left = view
            while len(left):
                left = left[os.write(fd, left) :]
            os.close(fd)

        def rate(work: Callable[[], None], path: Path, away: Callable[[], None]) -> float:
            took = seconds(work)
            if path.stat().st_size < forward.size:
                raise RuntimeError(f"{path} is not whole")
            away()
            return forward.size / 1e9 / took

        clocks = Clock(), Clock()
        ours, theirs = rounds(
            REPEATS,
            clocks[0].around(lambda: rate(lambda: held.write(job), dump, lambda: exchange.hand_back(sequence))),
            clocks[1].around(lambda: rate(plain, raw, raw.unlink)),
        )
        mine, other = (clock.each(1) for clock in clocks)
        best = min(1.0, other / (mine / len(os.sched_getaffinity(0))))
        note = f"processor time {1e3 * mine:.0f} ms against {1e3 * other:.0f} ms: {best:.2f}x at best on these cores"
        return ours, theirs, note

    for name, base in (("memory", place.memory), ("disk", place.disk)):
        ours, theirs, note = measured(base)
        told = f"a raw write to {filesystem(base)}"
        yield place.ratio(f"write_vs_raw, {name}", "GB/s", ours, theirs, Goal("at least", 0.95), told, note=note)
