"""The forward with the capture against the forward of the untouched engine.

Two real servers of the same model on the CPU: one is the edited engine and writes every prompt's states (three boundaries, the final state),
the other is the engine as it was installed. They take turns, prompt by prompt; whoever is not asked is stopped with SIGSTOP. What is
compared is the time that `DeepseekV2Model` takes for a prompt, taken from outside the hooks in both. Once with the tiny model, once with
one of Kimi-K2.5's width (7,168, bfloat16) and five layers. Two processes of one program differ by some per cent of so short a time as the tiny model's
forward, so that one is measured with three pairs of servers, one after the other. On a GPU the copies run on a stream of their own (`make bench-gpu`).
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 20
ROUNDS = {"tiny": 8, "7168 wide": 6}  # of a pair; a forward of the wide one takes over a second
PAIRS = {"tiny": 3, "7168 wide": 1}
PROMPTS = 3  # a round and side
TOKENS = 512


def run(place: Place) -> Iterator[Figure]:
    """Both models."""
    import rig

    from bench import servers

    with servers.engine(place.disk / "engine") as (python, lib):
        wide = servers.make_model(place.disk / "wide", *servers.WIDE)
        for name, model, dtype in (("tiny", rig.MODEL, "float32"), ("7168 wide", wide, "bfloat16")):
            captured: list[float] = []
            untouched: list[float] = []
            for pair in range(PAIRS[name]):
                folder = place.disk / f"{name.replace(' ', '-')}-{pair}"
                ours = servers.Server(folder / "capture", python, lib, model=model, dtype=dtype)
                plain = servers.Server(folder / "plain", rig.PYTHON, lib, model=model, dtype=dtype, capture=False)
                with contextlib.ExitStack() as stack:
                    # whoever starts first may have the better place in memory
                    for side in (ours, plain) if pair % 2 else (plain, ours):
                        stack.enter_context(side.serving())
                        side.pause()
                    for mine, found in zip((captured, untouched), compare(ours, plain, ROUNDS[name]), strict=True):
                        mine += found
            yield place.ratio(
                f"forward_overhead, {name}", "s", captured, untouched, Goal("at most", 1.05), "the untouched engine"
            )


def compare(ours: object, plain: object, count: int) -> tuple[list[float], list[float]]:
    """Median seconds of a forward of each round, with the capture and without."""
    from sglang_hs.dataset import sequence_name

    from bench import servers

    assert isinstance(ours, servers.Server) and isinstance(plain, servers.Server)
    found: dict[bool, list[float]] = {True: [], False: []}
    for number in range(count + 1):
        rows = servers.prompts(PROMPTS, TOKENS, TOKENS, seed=number)
        for side in (ours, plain) if number % 2 else (plain, ours):
            side.resume()
            mark = side.mark()
            for ids in rows:
                name = sequence_name(ids)
                if side.capture:
                    (side.dumps / "want" / name).write_text("")
                side.ask(ids, rid=name + "-1")
            took = [forward.took for forward in side.forwards(mark) if forward.tokens == TOKENS]
            if len(took) != PROMPTS:
                raise RuntimeError(f"{len(took)} forwards of {TOKENS} tokens for {PROMPTS} prompts")
            if side.capture:
                settle(side, rows)
            side.pause()
            if number:  # the first round warms
                found[side.capture].append(statistics.median(took))
    return found[True], found[False]


def settle(side: object, rows: list[list[int]]) -> None:
    """Every dump is there; away with them."""
    import os
    import time

    from sglang_hs.dataset import sequence_name

    from bench import servers

    assert isinstance(side, servers.Server)
    until = time.monotonic() + 60
    for ids in rows:
        name = sequence_name(ids)
        dump = side.dumps / "done" / f"{name}.safetensors"
        while not dump.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"no dump: {list((side.dumps / 'failed').iterdir())}")
            time.sleep(0.005)
        os.replace(dump, side.dumps / "used" / dump.name)  # as the client does
        (side.dumps / "want" / name).unlink()
