"""Finished samples on their way to a remote, against rclone alone with the same files.

Ours is what a run does: batches by the book, `rclone copy`, the far end verified against the book's sha256, entered durably, removed here.
The other side is one rclone without us. Over SFTP that is `rclone move`, which compares checksums with the remote as well before it removes;
over WebDAV, which has no checksums, `rclone copy` and then `rclone check --download`. The servers are rclone's own on this machine, and files
and servers' folders lie in memory: no disk, no network, all of it processor time, which is the hardest case for whoever does more than copying.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.frame import ROOT, Figure, Goal, Place, Watch, rounds

PYTHON = "controller"
ORDER = 145
FILES, SIZE = (
    32,
    32 << 20,
)  # of the size of real samples, and enough of them that the starts of rclone are not what is measured
REPEATS = 3
LIMIT = """
Processor time, where sender, server and both ends' checksums share two cores: the note has what all of it takes for a GB. What ours adds is the book's sha256
of each file here, without which a file that changed on this disk before it went would go as it is, and three starts of rclone a batch, each with a connection
of its own, which larger batches (up to 4 GB in a run) make rarer.
"""


def run(place: Place) -> Iterator[Figure]:
    """Two protocols."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "module_utils")]
    import far as remotes
    from sglang_hs.manifest import Manifest
    from sglang_hs.moving import Move, Mover

    memory = place.memory
    master = memory / "master/hidden_states"
    master.mkdir(parents=True)
    rng = random.Random(0)
    sums = {}
    for idx in range(FILES):
        data = rng.randbytes(SIZE)
        (master / f"hs_{idx}.safetensors").write_bytes(data)
        sums[idx] = hashlib.sha256(data).hexdigest()
    total = FILES * SIZE / 1e9

    turns = itertools.count()

    def far_folder(made: remotes.Far) -> tuple[str, Path]:
        """A folder of the remote that was never used before, and where it lies: what a server has cached of one is not measured."""
        name = f"-{next(turns)}"
        return made.to + name, made.place.with_name(made.place.name + name)

    def fresh(name: str) -> Path:
        """An output folder with every file in it."""
        output = memory / name
        shutil.rmtree(output, ignore_errors=True)
        (output / "hidden_states").mkdir(parents=True)
        for path in master.iterdir():
            os.link(path, output / "hidden_states" / path.name)
        return output

    base = place
    for kind, alone in (("sftp", "rclone move"), ("webdav", "rclone copy, then rclone check --download")):
        made = remotes.Far(base.memory / kind, kind)

        spent: dict[str, list[float]] = {"ours": [], "theirs": []}  # processor seconds of everybody, servers too

        def ours(made: remotes.Far = made, spent: dict[str, list[float]] = spent) -> float:
            output = fresh("ours")
            to, place = far_folder(made)
            book = Manifest(output)
            book.add((idx, str(idx), 1, None) for idx in range(FILES))
            for idx in range(FILES):
                book.done(idx, f"hidden_states/hs_{idx}.safetensors", SIZE, sums[idx])
            book.commit()
            busy, began = Watch.now()[1], time.perf_counter()
            mover = Mover(output, book, Move.of({**made.move(), "to": to}))
            mover.start(drain=True)
            mover.join()
            took = time.perf_counter() - began
            spent["ours"].append(Watch.now()[1] - busy)
            status = mover.status()
            book.close()
            if status["moved"] != FILES or os.listdir(output / "hidden_states"):
                raise RuntimeError(f"not moved: {status}")
            shutil.rmtree(place)
            return total / took

        def theirs(made: remotes.Far = made, kind: str = kind, spent: dict[str, list[float]] = spent) -> float:
            output = fresh("theirs")
            to, place = far_folder(made)
            words = [str(made.rclone), "--config", str(made.config)]
            busy, began = Watch.now()[1], time.perf_counter()
            if kind == "sftp":
                subprocess.run([*words, "move", str(output), to], check=True)
            else:
                subprocess.run([*words, "copy", str(output), to], check=True)
                subprocess.run([*words, "check", "--download", str(output), to], check=True, capture_output=True)
            took = time.perf_counter() - began
            spent["theirs"].append(Watch.now()[1] - busy)
            if len(list(place.rglob("hs_*"))) != FILES:
                raise RuntimeError("rclone left something out")
            shutil.rmtree(place)
            return total / took

        with made.serving():
            mine, other = rounds(REPEATS, ours, theirs)
        each = [statistics.median(spent[side]) / total for side in ("ours", "theirs")]
        note = f"{FILES} files of {SIZE / 1e6:.0f} MB; processor time of all, servers included, a GB: {each[0]:.1f} s against {each[1]:.1f} s"
        yield base.ratio(f"move_on, {kind}", "GB/s", mine, other, Goal("at least", 0.9), alone, note=note)
