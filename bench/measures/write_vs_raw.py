"""The capture's writer against a raw write of the same bytes.

One sample of 2,048 tokens (4 states of 7,168 in bfloat16, 117 MB) lies in a host buffer. Ours is what the writer's thread does with it: token ids,
header, CRC-32 of the data, temporary name, rename; the file is one that the client has taken and handed back, as all are but the first few.
The other side opens a file in the same folder and gives the kernel the same
buffer in one `write`. Neither syncs: the dump folder is scratch. The figure is the part of the raw rate that the writer reaches, in memory
(`/dev/shm`, where dumps lie by default) and on a disk.
"""

from __future__ import annotations

import os
import statistics
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.frame import Clock, Figure, Goal, Place, filesystem, rounds, seconds

PYTHON = "engine"
ORDER = 10
REPEATS = 25
LIMIT = """
The sum beside the write. It runs in threads of its own (two beside the one write), so it costs no time where there are cores for it, but it reads the same
memory that the write reads, on cores that share its bandwidth. The note of each figure has what a bare write reaches here with one bare `zlib.crc32` of the
same buffer beside it, nothing else done: no writer that sums what it writes can be faster on this machine.
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

        def summed() -> None:
            beside = threading.Thread(target=zlib.crc32, args=(view,))
            beside.start()
            plain()
            beside.join()

        def rate(work: Callable[[], None], path: Path, away: Callable[[], None]) -> float:
            took = seconds(work)
            if path.stat().st_size < forward.size:
                raise RuntimeError(f"{path} is not whole")
            away()
            return forward.size / 1e9 / took

        clocks = Clock(), Clock()
        ours, theirs, both = rounds(
            REPEATS,
            clocks[0].around(lambda: rate(lambda: held.write(job), dump, lambda: exchange.hand_back(sequence))),
            clocks[1].around(lambda: rate(plain, raw, raw.unlink)),
            lambda: rate(summed, raw, raw.unlink),
        )
        mine, other = (clock.each(1) for clock in clocks)
        bare = statistics.median(one / alone for one, alone in zip(both, theirs, strict=True))
        note = f"processor time {1e3 * mine:.0f} ms against {1e3 * other:.0f} ms; a bare write with a bare sum beside it: {bare:.2f}x"
        return ours, theirs, note

    for name, base in (("memory", place.memory), ("disk", place.disk)):
        ours, theirs, note = measured(base)
        told = f"a raw write to {filesystem(base)}"
        yield place.ratio(f"write_vs_raw, {name}", "GB/s", ours, theirs, Goal("at least", 0.95), told, note=note)
