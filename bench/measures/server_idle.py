"""The share of the time in which the server has no prompt to work on, during a run of 1,000 prompts.

A real server on the CPU with the tiny model and the client as it is, four prompts in flight, prompts of 64 to 512 tokens. Inside the
server's scheduler it is written down from when to when it finds nothing to do; the share is taken of the time from the first prompt's
forward to the last one's, in ten parts of the run. The server competes with the client for the two cores here, and a prompt takes it
some 0.05 s, so that whatever keeps the client from handing on the next one shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 60
COUNT = 1000
SHORTEST = 64  # tokens; a shorter forward is one of the server's own looks at its health
PARTS = 10


def run(place: Place) -> Iterator[Figure]:
    """One run, cut into parts."""
    from bench import servers

    with servers.engine(place.disk / "engine") as (python, lib):
        side = servers.Server(place.disk / "run", python, lib)
        with side.serving():
            servers.write_dataset(side.dataset, servers.prompts(COUNT, SHORTEST, 512))
            mark = side.mark()
            client = side.begin()
            ended = side.end(client, patience=600)
            if ended.code != 0 or len(side.files()) != COUNT:
                raise RuntimeError(f"the client ended with {ended.code}: {ended.out[-2000:]}")
            forwards = [forward for forward in side.forwards(mark) if forward.tokens >= SHORTEST]
            idle = side.idle(mark)
    if len(forwards) != COUNT:
        raise RuntimeError(f"{len(forwards)} forwards for {COUNT} prompts")
    step = COUNT // PARTS
    edges = [forwards[index].begin for index in range(0, COUNT, step)] + [forwards[-1].end]
    shares = []
    for begin, end in zip(edges, edges[1:], strict=False):
        without = sum(max(0.0, min(stop, end) - max(start, begin)) for start, stop in idle)
        shares.append(100 * without / (end - begin))
    yield place.absolute("server_idle", "%", shares, Goal("at most", 2.0), note=f"{COUNT} prompts, {PARTS} parts")
