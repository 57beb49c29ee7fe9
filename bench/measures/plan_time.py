"""The plan of 37,312 records and 87.8 million tokens: what `hs_scan` does before anything else, in seconds.

Every record has ids of a vocabulary of 163,840 and a loss mask, is 256 to 8,192 tokens long and checked as strictly as the client
will check it; the data set's sha256 is part of it. As JSON lines (0.9 GB), as Parquet and as an arrow data set. A line that is plainly right is
counted in the pass that parses it (msgspec checks types and ranges while it parses; pyarrow never makes a number Python's); whatever is not
is read again by the slow way, which says what is wrong.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

from bench.frame import Figure, Goal, Place, seconds

PYTHON = "engine"
ORDER = 110
RECORDS, TOKENS = 37312, 87_800_000
KINDS = 64  # records that differ; the file repeats them
REPEATS = 3


def lengths() -> list[int]:
    """Of the records that differ, so that all records together have TOKENS tokens (to 0.1 %)."""
    import random

    rng = random.Random(0)
    shape = [rng.lognormvariate(0, 0.6) for _ in range(KINDS)]
    low, high = 1.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        found = [min(max(round(part * middle), 256), 8192) for part in shape]
        low, high = (middle, high) if sum(found) * RECORDS < TOKENS * KINDS else (low, middle)
    return found


def write(folder: Path) -> dict[str, Path]:
    """The same data set in three forms."""
    import numpy
    import pyarrow
    import pyarrow.parquet

    generator = numpy.random.default_rng(0)
    rows = []
    for length in lengths():
        ids = generator.integers(0, 163840, length).tolist()
        rows.append({"input_ids": ids, "loss_mask": (generator.random(length) < 0.5).astype(int).tolist()})
    lines = [(json.dumps(row) + "\n").encode() for row in rows]
    paths = {"JSON lines": folder / "d.jsonl", "Parquet": folder / "d.parquet", "arrow": folder / "arrow"}
    with paths["JSON lines"].open("wb") as handle:
        for number in range(RECORDS):
            handle.write(lines[number % KINDS])
    table = pyarrow.Table.from_pylist(rows)
    paths["arrow"].mkdir()
    shard = "data-00000-of-00001.arrow"
    with (
        pyarrow.parquet.ParquetWriter(str(paths["Parquet"]), table.schema) as columns,
        pyarrow.ipc.new_stream(str(paths["arrow"] / shard), table.schema) as stream,
    ):
        for number in range(0, RECORDS, KINDS):
            part = table.slice(0, min(KINDS, RECORDS - number))
            columns.write_table(part)
            stream.write_table(part)
    (paths["arrow"] / "state.json").write_text(json.dumps({"_data_files": [{"filename": shard}]}))
    return paths


def run(place: Place) -> Iterator[Figure]:
    """Each form."""
    from sglang_hs import plan

    for name, path in write(place.disk).items():
        settings = {
            "dataset": str(path),
            "output_dir": str(place.disk / "out"),
            "dump_dir": str(place.disk / "dump"),
            "state_dir": str(place.disk / "state"),
            "cut_to": 8192,
            "max_prompt": 16384,
            "boundaries": [3, 31, 59],
            "final": "pre_norm",
            "in_flight": 4,
            "tokens_per_forward": 0,
            "model": {"hidden_size": 1, "vocab_size": 163840, "itemsize": 2},
        }
        found = plan.look(settings, False, 0)  # once before, so that the file is in memory
        if found["samples"] != RECORDS or abs(found["tokens"] / TOKENS - 1) > 0.001:
            raise RuntimeError(f"{found['samples']} records and {found['tokens']} tokens")
        took = [seconds(functools.partial(plan.look, settings, False, 0)) for _ in range(REPEATS)]
        note = f"{RECORDS:,} records, {found['tokens']:,} tokens"
        yield place.absolute(f"plan_time, {name}", "s", took, Goal("at most", 10.0), note=note)
