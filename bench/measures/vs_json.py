"""A sample by the capture against a sample by `return_hidden_states` over HTTP, from the same real server.

A server on the CPU with a model of Kimi-K2.5's width (7,168, bfloat16) and five layers, edited for the capture and started with
`--enable-return-hidden-states`. Prompts of 2,048 tokens, each asked for in both ways: by the client's own functions to a verified file in its place, and
as JSON, parsed, made a tensor and saved. The time is that of a sample without the server's forward, which is the same for both. JSON brings one state
a token (the last layer's), the capture four: the figure is not corrected for that.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator

from bench.frame import ROOT, Figure, Goal, Place

PYTHON = "controller"
ORDER = 25
TOKENS, PROMPTS = 2048, 3
LIMIT = """
The disk, and what JSON does not bring. The note has what one synced write of a sample's bytes takes here, with nothing before and after it: whoever keeps
the states cannot be further ahead of JSON than that. Ours adds two checksums, a look at every value and a sha256. And JSON hands over one state of
a token, the capture four: for the same states it would take about four times as long (SGLang cannot be asked for the others). Its numbers are not
durable when its time ends, nor checked.
"""


def run(place: Place) -> Iterator[Figure]:
    """In turns."""
    import os

    import rig

    from bench import servers

    with servers.engine(place.disk / "engine") as (python, lib):
        model = servers.make_model(place.disk / "wide", *servers.WIDE)
        side = servers.Server(
            place.disk / "run", python, lib, model=model, dtype="bfloat16", extra=("--enable-return-hidden-states",)
        )
        with side.serving():
            spec, rows = side.folder / "spec.json", side.folder / "rows.json"
            spec.write_text(json.dumps(side.spec()))
            rows.write_text(json.dumps(servers.prompts(PROMPTS + 1, TOKENS, TOKENS)))
            words = [str(rig.PYTHON), "-m", "bench.ask", str(spec), str(rows), str(side.times)]
            code = f"{ROOT}:{ROOT}/module_utils:{ROOT}/files/engine"
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": code}
            done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=env, timeout=500)
            if done.returncode != 0:
                raise RuntimeError(f"{done.stdout}\n{side.log.read_text()[-3000:]}")
    ours, theirs, bare = (found[1:] for found in json.loads(done.stdout.splitlines()[-1]))
    told = "return_hidden_states over HTTP"
    write = statistics.median(bare)
    most = statistics.median(theirs) / write
    note = f"without the forward; one synced write of a sample's bytes to this disk takes {write:.2g} s: {most:.0f}x at most for whoever keeps them"
    yield place.ratio("vs_json", "s", ours, theirs, Goal("at least", 100.0), told, inverse=True, note=note)
