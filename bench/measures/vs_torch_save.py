"""The dump against what was done by hand: four `torch.save` in the forward, and a marker file.

Both are given the same states of 2,048 tokens (three boundaries and the final state of 7,168 in bfloat16) in the same hooks, and write
to memory. Ours are taken away between two rounds as the client does it: the next dump is written over one that was taken.
*In the forward*: how long the hooks keep the forward, against four plain copies of the same tensors: it waits for nothing else. *By hand,
in the forward*: the same against four `torch.save`. *End to end*: from the first hook to the last readable dump, eight forwards one after
the other that compute nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from bench.frame import Figure, Goal, Place, rounds, seconds

PYTHON = "engine"
ORDER = 30
REPEATS = 15
COUNT = 8


def run(place: Place) -> Iterator[Figure]:
    """In the forward, and end to end."""
    import itertools

    import torch
    from sglang_hs_client.exchange import Exchange

    from bench import capture

    capture.one_thread()
    forward = capture.Forward()
    dumps, by_hand = place.memory / "dumps", place.memory / "by-hand"
    by_hand.mkdir()
    recorder = capture.recorder(dumps)
    written, exchange = capture.Written(recorder), Exchange(dumps)
    numbers = itertools.count()
    kept = torch.empty((forward.tokens, 4, forward.hidden), dtype=torch.bfloat16)

    def wishes(count: int) -> list[list[int]]:
        rows = [forward.ids(next(numbers)) for _ in range(count)]
        for ids in rows:
            capture.wish(dumps, capture.sequence_name(ids))
        return rows

    def clear() -> None:
        written.wait()
        for path in (dumps / "done").iterdir():
            exchange.hand_back(path.stem)
        for path in [*(dumps / "want").iterdir(), *by_hand.iterdir()]:
            path.unlink()

    def hooks() -> float:
        (ids,) = wishes(1)
        took = seconds(lambda: forward.run(recorder, ids))
        clear()
        return took

    def copies() -> float:
        def work() -> None:
            for place_, state in enumerate(forward.states):
                kept[:, place_].copy_(state)

        return seconds(work)

    def save(number: int) -> None:
        for boundary, state in enumerate(forward.states):
            torch.save(state.detach().cpu().clone(), by_hand / f"{number}_{boundary}.pt")
        (by_hand / f"{number}.done").touch()

    def saves() -> float:
        took = seconds(lambda: save(0))
        clear()
        return took

    def whole() -> float:
        rows = wishes(COUNT)

        def work() -> None:
            for ids in rows:
                forward.run(recorder, ids)
            written.wait()

        took = seconds(work)
        assert len(list((dumps / "done").iterdir())) == COUNT
        clear()
        return took / COUNT

    def whole_by_hand() -> float:
        took = seconds(lambda: deque(map(save, range(COUNT)), 0))
        clear()
        return took / COUNT

    ours, plain, hand = rounds(REPEATS, hooks, copies, saves)
    yield place.ratio(
        "vs_torch_save, in the forward", "s", ours, plain, Goal("at most", 1.1), "four plain copies of the tensors"
    )
    yield place.ratio(
        "vs_torch_save, by hand, in the forward",
        "s",
        ours,
        hand,
        Goal("at least", 1.6),
        "four torch.save",
        inverse=True,
    )
    ours, hand = rounds(REPEATS, whole, whole_by_hand)
    told = "four torch.save and a marker file"
    yield place.ratio("vs_torch_save, end to end", "s", ours, hand, Goal("at least", 1.6), told, inverse=True)
