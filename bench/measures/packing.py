"""Tokens a second with several short prompts in a forward against one prompt in a forward.

Two real servers on the CPU, the client as it is against each, prompts of 64 to 256 tokens, in turns; whoever is not asked is stopped with
SIGSTOP. One packs up to 4,096 tokens into a forward (`hs_tokens_per_forward`), the other takes one prompt. The model has Kimi-K2.5's
61 layers in the tiny model's width, so that a forward has a cost of its own beside that of its tokens, as it has on the
target (where every forward reads all weights of its experts). A CPU's arithmetic is slow beside that cost: what is gained
there is less than on a GPU, where hundreds of tokens cost hardly more than one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 70
COUNT = 96
ROUNDS = 3
MODEL = (
    "num_hidden_layers=61", "hidden_size=64", "intermediate_size=64", "moe_intermediate_size=16", "n_routed_experts=4", "num_experts_per_tok=2",
)  # fmt: skip
TOKENS_PER_FORWARD = 4096


def run(place: Place) -> Iterator[Figure]:
    """Both servers."""
    from sglang_hs.command import PROMPTS_IN_FLIGHT

    from bench import servers

    with servers.engine(place.disk / "engine") as (python, lib):
        model = servers.make_model(place.disk / "deep", *MODEL)
        more: dict[str, Any] = {"model": model, "boundaries": (3, 31, 59)}
        packed = servers.Server(place.disk / "packed", python, lib, tokens_per_forward=TOKENS_PER_FORWARD, **more)
        alone = servers.Server(place.disk / "alone", python, lib, **more)
        how: dict[bool, dict[str, Any]] = {
            True: {"in_flight": PROMPTS_IN_FLIGHT, "tokens_in_flight": 2 * TOKENS_PER_FORWARD},
            False: {"in_flight": 4},
        }
        rates: dict[bool, list[float]] = {True: [], False: []}
        prompts: list[float] = []
        with contextlib.ExitStack() as stack:
            for side in (packed, alone):
                stack.enter_context(side.serving())
                side.pause()
            for number in range(ROUNDS + 1):
                rows = servers.prompts(COUNT, 64, 256, seed=number)
                for side in (packed, alone) if number % 2 else (alone, packed):
                    side.resume()
                    side.forget()
                    servers.write_dataset(side.dataset, rows)
                    mark = side.mark()
                    ended = side.end(side.begin(**how[side is packed]), patience=600)
                    if ended.code != 0 or len(side.files()) != COUNT:
                        raise RuntimeError(f"the client ended with {ended.code}: {ended.out[-2000:]}")
                    forwards = side.forwards(mark)
                    side.pause()
                    if not number:
                        continue
                    last = max(os.stat(side.output / "hidden_states" / name).st_ctime_ns for name in side.files())
                    # the log has the monotonic clock, files have the other
                    import time

                    last_in_place = last / 1e9 - time.time() + time.monotonic()
                    rates[side is packed].append(sum(map(len, rows)) / (last_in_place - forwards[0].begin))
                    if side is packed:
                        prompts.append(COUNT / len(forwards))
    note = f"{sum(prompts) / len(prompts):.1f} prompts a forward"
    yield place.ratio(
        "packing", "tokens/s", rates[True], rates[False], Goal("at least", 3.0), "one prompt a forward", note=note
    )
