"""What a run writes when its data set is through, while production is still down: `samples.jsonl` and the arrow data set, per 100,000 rows.

The client's own function, with rows of the lengths of plan_time and a mask each, all of them in the book as done. Every row is read from the data set again,
checked as ever, written as a line of JSON and into the arrow file, both synced, and the arrow file's sha256 is taken.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator

from bench.frame import Clock, Figure, Goal, Place, seconds

PYTHON = "engine"
ORDER = 140
ROWS, PER = 4000, 100_000
REPEATS = 3


def run(place: Place) -> Iterator[Figure]:
    """One folder, written several times."""
    import random

    from sglang_hs.manifest import Manifest
    from sglang_hs_client.output import file_name
    from sglang_hs_client.run import Run
    from sglang_hs_client.spec import parse

    from bench import scale
    from bench.measures.plan_time import lengths

    folder = place.disk / "finish"
    for name in ("out", "dump", "model"):
        (folder / name).mkdir(parents=True)
    rng = random.Random(0)
    rows = [[rng.randrange(163840) for _ in range(length)] for length in lengths()]
    with (folder / "data.jsonl").open("w") as handle:
        for idx in range(ROWS):
            ids = rows[idx % len(rows)]
            handle.write(json.dumps({"input_ids": ids, "loss_mask": [idx % 2] * len(ids)}) + "\n")
    book = Manifest(folder / "out", lag=3600)
    for idx in range(ROWS):
        book.add([(idx, f"{idx:064x}", len(rows[idx % len(rows)]), None)])
        book.done(idx, file_name(idx), 1, "0" * 64)
    book.commit()
    made = Run(parse({**scale.specification(folder), "vocab_size": 163840, "max_prompt": 16384}))
    clock = Clock()
    work = clock.around(functools.partial(seconds, functools.partial(made._write_rows, book)))
    took = [work() * PER / ROWS for _ in range(REPEATS + 1)][1:]
    with (folder / "out/samples.jsonl").open() as lines:
        written = sum(1 for _ in lines)
    book.close()
    if written != ROWS:
        raise RuntimeError(f"{written} lines for {ROWS} rows")
    tokens = sum(len(rows[idx % len(rows)]) for idx in range(ROWS)) / ROWS
    note = (
        f"{ROWS} rows of {tokens:,.0f} tokens were written; {clock.each(1) * PER / ROWS:.0f} s of it are processor time"
    )
    yield place.absolute("finish", "s", took, Goal("at most", 60.0), "100,000 rows", note=note)
