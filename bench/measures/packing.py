"""Tokens a second with several short prompts in a forward against one prompt in a forward.

Two real servers on the CPU, the client as it is against each, prompts of 64 to 256 tokens, in turns; whoever is not asked is stopped with
SIGSTOP. One packs up to 4,096 tokens into a forward (`hs_tokens_per_forward`), the other takes one prompt. What packing gains is a forward's own cost,
paid once for several prompts: on the target the reading of all experts' weights, worth hundreds of tokens' arithmetic. A CPU's arithmetic is slow beside
that, so the model here has Kimi-K2.5's 61 layers and hardly any width, one head and a residual stream of 64: the note has both costs. The wider the
model, the less is gained on a CPU: with the tiny model's four heads, where a forward costs as much as 140 tokens, 1.8x was measured and no more was possible.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from bench.frame import Figure, Goal, Place

PYTHON = "controller"
ORDER = 70
COUNT = 96
ROUNDS = 3
MODEL = (
    "num_hidden_layers=61", "hidden_size=64", "intermediate_size=32", "moe_intermediate_size=16", "n_routed_experts=4", "num_experts_per_tok=2",
    "num_attention_heads=1", "num_key_value_heads=1", "q_lora_rank=16", "kv_lora_rank=16", "qk_nope_head_dim=16", "v_head_dim=16",
)  # fmt: skip
TOKENS_PER_FORWARD = 4096
LIMIT = """
A CPU's arithmetic: the note has what a forward costs of its own and what each token adds, fitted to the forwards of single prompts of this run, and
the most that packing could gain with these two numbers. On a GPU the first is the reading of all weights, the second hardly anything up to some
hundreds of tokens; that was not measured here.
"""


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
        single: list[servers.Forward] = []
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
                    last_in_place = last / 1e9 - time.time() + time.monotonic()
                    rates[side is packed].append(sum(map(len, rows)) / (last_in_place - forwards[0].begin))
                    if side is packed:
                        prompts.append(COUNT / len(forwards))
                    else:
                        single += forwards
    own, each = fit([(forward.tokens, forward.took) for forward in single])
    mean = sum(forward.tokens for forward in single) / len(single)
    together = sum(prompts) / len(prompts)
    most = (own + each * mean) / (own / together + each * mean)
    note = f"{together:.1f} prompts a forward; a forward costs {1e3 * own:.0f} ms and {1e3 * each:.2f} ms a token: {most:.1f}x at most"
    yield place.ratio(
        "packing", "tokens/s", rates[True], rates[False], Goal("at least", 3.0), "one prompt a forward", note=note
    )


def fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of a forward without tokens, seconds of a token), by least squares."""
    tokens, took = ([point[side] for point in points] for side in (0, 1))
    line = statistics.linear_regression(tokens, took)
    return line.intercept, line.slope
