"""Before the data set: a few prompts prove that what the capture hands out are the states that they are said to be.

(a) every tensor-parallel rank holds the same; (b) twice the same prompt gives the same; (c) ``lm_head(norm(final))``, computed
from the checkpoint, reproduces the server's own log-probabilities; (d) each boundary, normed with its layer's own weight, is
what that layer's attention received, and the boundaries differ and have sane norms; (e) the longest sample comes out whole; and, where
prompts may share a forward, they come out as they do alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from safetensors import safe_open

from .checkpoint import Checkpoint
from .dumpfile import Expected, check_data, check_header, prompts_in_forward, read_header
from .exchange import Exchange
from .faults import CanaryRefused, SampleFault
from .server import Server
from .spec import Spec

LONGEST = 256  # tokens of a canary prompt: the server computes logits over the whole vocabulary for each
TOGETHER_TRIES = 5  # the server decides which prompts share a forward
TOP = 8  # log-probabilities compared at each position
MOST = 0.95  # of the rows must agree: mixture-of-experts routing may flip for a few in half precision


@dataclass(frozen=True)
class Tolerance:
    """state: relative error of a row (L2). logprob: difference of log-probabilities, in nats."""

    state: float
    logprob: float


TOLERANCES = {"float32": Tolerance(1e-3, 0.02), "float16": Tolerance(0.01, 0.15), "bfloat16": Tolerance(0.03, 0.4)}


Alone = Tuple[
    str, List[int], torch.Tensor
]  # name, ids and states [T, slots, H] of a prompt that had a forward to itself


@dataclass
class Numbers:
    """What was measured, for result.json and manifest.json."""

    sequences: int = 0
    positions: int = 0
    ranks: int = 0
    rank_difference: float = 0.0
    repeat_difference: float = 0.0
    logprob_difference: float = 0.0
    boundary_difference: Dict[str, float] = field(default_factory=dict)
    rms: Dict[str, float] = field(default_factory=dict)
    together: int = 0  # most prompts that were seen in one forward
    together_difference: float = 0.0
    longest: int = 0
    state_tolerance: float = 0.0  # of each difference of states
    logprob_tolerance: float = 0.0


def prompts(rows: List[List[int]], spec: Spec) -> List[List[int]]:
    """Prompts out of the data set's first rows, long enough together for the positions asked for (more of the same if not)."""
    limit = min(LONGEST, spec.max_prompt)
    chosen = [ids[:limit] for ids in rows[: spec.canary.sequences]]
    short = spec.canary.positions - sum(len(ids) - 1 for ids in chosen)
    stream = [token for ids in rows for token in ids]
    while short > 0:
        length = min(short + 1, limit)
        if length < 2:
            break
        extra = (stream * (length // len(stream) + 1))[:length]
        stream = stream[1:] + stream[:1]
        if extra not in chosen:
            chosen.append(extra)
        elif len(set(stream)) < 2:
            break  # nothing but one token: there is no other prompt to be made of it
        short -= length - 1
    return chosen


class Canary:
    """One run of the checks. ``ids`` of prompts are lists of tokens; states are float32 [T, ...] here whatever the server's type."""

    def __init__(self, spec: Spec, server: Server, exchange: Exchange, expected: Expected, ranks: int) -> None:
        self.spec = spec
        self.server = server
        self.exchange = exchange
        self.expected = expected
        self.ranks = ranks
        self.tolerance = TOLERANCES[expected.dtype]
        self.checkpoint = Checkpoint(Path(spec.model_path))
        self.numbers = Numbers(
            ranks=ranks, state_tolerance=self.tolerance.state, logprob_tolerance=self.tolerance.logprob
        )
        self._errors: List[torch.Tensor] = []

    def run(self, samples: List[Tuple[str, List[int]]], longest: Tuple[str, List[int]]) -> Numbers:
        """Check prompts (name, ids), then the longest sample; CanaryRefused at the first check that fails."""
        alone: List[Alone] = []
        for name, ids in samples:
            states, others, meta = self._first(name, ids)
            self._same_on_ranks(states, others)
            self._same_again(name, ids, states)
            self._boundaries(states)
            self._logprobs(ids, states, meta)
            self.numbers.sequences += 1
            alone.append((name, ids, states["hidden_states"]))
        if self.numbers.positions < min(self.spec.canary.positions, sum(len(ids) - 1 for _, ids in samples)):
            raise self._refuse(
                "the server gave log-probabilities for only {} positions".format(self.numbers.positions),
                "a release that answers return_logprob otherwise",
            )
        if self.spec.tokens_in_flight is not None:
            self._together(alone)
        self._whole(*longest)
        return self.numbers

    # -- getting states ------------------------------------------------------------------------------------------------

    def _ask(self, name: str, ids: List[int], logprobs: int) -> Dict[str, Any]:
        try:
            return self.server.generate(ids, name + "-canary", logprobs)
        except SampleFault as fault:
            raise self._refuse(
                fault.reason, "a prefix cache left on, a context shorter than the prompts, or an unhealthy server"
            ) from fault

    def _take(self, path: Path, name: str, ids: List[int]) -> Dict[str, torch.Tensor]:
        header = check_header(path, len(ids), name, self.expected)
        check_data(path, header, ids)
        with safe_open(str(path), framework="pt") as handle:
            return {key: handle.get_tensor(key).to(torch.float32) for key in handle.keys() if key != "token_ids"}

    def _first(
        self, name: str, ids: List[int]
    ) -> Tuple[Dict[str, torch.Tensor], List[Dict[str, torch.Tensor]], Dict[str, Any]]:
        """The prompt's states on rank 0 and on the others, and the server's answer with log-probabilities."""
        with self.exchange.every_rank():
            self.exchange.wish(name, every_rank=True)
            try:
                meta = self._ask(name, ids, TOP)
                self._take(self.exchange.wait(name, self.spec.dump_wait_s), name, ids)
                found = [
                    self._take(self.exchange.wait_rank(name, rank, self.spec.dump_wait_s), name, ids)
                    for rank in range(self.ranks)
                ]
            except SampleFault as fault:
                raise self._refuse(
                    fault.reason, "see the reason; the server's log has the capture's messages"
                ) from fault
            finally:
                self.exchange.forget(name)
                self.exchange.forget_ranks(name, self.ranks)
        return found[0], found[1:], meta

    # -- the checks ----------------------------------------------------------------------------------------------------

    def _same_on_ranks(self, states: Dict[str, torch.Tensor], others: List[Dict[str, torch.Tensor]]) -> None:
        for rank, other in enumerate(others, 1):
            for slot in range(self.spec.states):
                error = row_error(states["hidden_states"][:, slot], other["hidden_states"][:, slot])
                worst = quantile(error, MOST)
                self.numbers.rank_difference = max(self.numbers.rank_difference, worst)
                if worst > self.tolerance.state:
                    raise self._refuse(
                        "{} on rank {} differs from rank 0 by {:.2g} (relative)".format(
                            self._slot_name(slot), rank, worst
                        ),
                        "a partial sum: the all-reduce was fused into the next layer's norm (--disable-flashinfer-allreduce-fusion or the like)",
                    )

    def _same_again(self, name: str, ids: List[int], states: Dict[str, torch.Tensor]) -> None:
        try:
            self.exchange.wish(name)
            self._ask(name, ids, 0)
            again = self._take(self.exchange.wait(name, self.spec.dump_wait_s), name, ids)
        except SampleFault as fault:
            raise self._refuse(
                "the second time the same prompt gave no dump: {}".format(fault.reason),
                "a prefix cache: start the server with --disable-radix-cache",
            ) from fault
        finally:
            self.exchange.forget(name)
        shape = (len(ids), -1)
        worst = quantile(row_error(states["hidden_states"].reshape(shape), again["hidden_states"].reshape(shape)), MOST)
        self.numbers.repeat_difference = max(self.numbers.repeat_difference, worst)
        if worst > self.tolerance.state:
            raise self._refuse(
                "the same prompt gave states that differ by {:.2g} (relative)".format(worst),
                "buffers overwritten before they were copied, or other traffic sharing the forwards",
            )

    def _boundaries(self, states: Dict[str, torch.Tensor]) -> None:
        hidden = states["hidden_states"]
        before: Optional[torch.Tensor] = None
        for slot in range(self.spec.states):
            state, what = hidden[:, slot], self._slot_name(slot)
            size = float(state.pow(2).mean(-1).sqrt().median())
            self.numbers.rms[what] = round(size, 6)
            if before is not None:
                size_before = float(before.pow(2).mean(-1).sqrt().median())
                if quantile(row_error(before, state), 0.5) < 1e-5:
                    raise self._refuse("{} equals the state before it".format(what), "the same layer captured twice")
                if not 1e-2 < size / max(size_before, 1e-30) < 1e4:
                    raise self._refuse(
                        "{} has a norm of {:.3g} after {:.3g}".format(what, size, size_before),
                        "a state that is not the residual stream (the output of one block alone, a normed state)",
                    )
            before = state
        witness = states.get("attention_input")
        if witness is None:
            raise self._refuse(
                "the capture saw no attention input to check the boundaries against",
                "a layer layout of an unknown release",
            )
        for index, boundary in enumerate(self.spec.boundaries):
            weight = self.checkpoint.vector("model.layers.{}.input_layernorm.weight".format(boundary))
            worst = quantile(row_error(witness[index], self._norm(hidden[:, index], weight)), MOST)
            key = str(boundary)
            self.numbers.boundary_difference[key] = max(self.numbers.boundary_difference.get(key, 0.0), worst)
            if worst > self.tolerance.state:
                raise self._refuse(
                    "boundary {} is not what layer {} read: its norm differs by {:.2g} (relative) from the attention's input".format(
                        boundary, boundary, worst
                    ),
                    "a boundary off by one layer, or a partial sum",
                )

    def _logprobs(self, ids: List[int], states: Dict[str, torch.Tensor], meta: Dict[str, Any]) -> None:
        last = states["hidden_states"][:, -1]
        weight = self.checkpoint.vector("model.norm.weight")
        if self.spec.final == "post_norm":
            normed, looks = last, looks_normed(last, weight)
            if not looks:
                raise self._refuse(
                    "the final state is asked for post-norm and is not normed", "pre-norm and post-norm mixed up"
                )
        else:
            normed = self._norm(last, weight)
            if looks_normed(last, weight):
                raise self._refuse(
                    "the final state is asked for pre-norm and is already normed",
                    "pre-norm and post-norm mixed up: a trainer would norm it twice",
                )
        post = states.get("final_post_norm")
        if post is not None and quantile(row_error(post, normed), MOST) > self.tolerance.state:
            raise self._refuse(
                "the post-norm final state is not the norm of the pre-norm one", "pre-norm and post-norm mixed up"
            )
        compared = top_logprobs(meta)
        if not compared:
            raise self._refuse(
                "the server's answer has no input_top_logprobs", "a release that answers return_logprob otherwise"
            )
        rows = self.checkpoint.head_rows([token for top in compared.values() for token, _ in top])
        for place, top in compared.items():
            # the state at place - 1 predicts the token at place; differences to the first need no sum over the vocabulary
            logits = torch.stack([rows[token] for token, _ in top]) @ normed[place - 1]
            given = torch.tensor([value for _, value in top], dtype=torch.float32)
            self._errors.append(((logits - logits[0]) - (given - given[0])).abs().max())
        self.numbers.positions += len(compared)
        worst = quantile(torch.stack(self._errors), MOST)
        self.numbers.logprob_difference = worst
        if worst > self.tolerance.logprob:
            raise self._refuse(
                "lm_head(norm(final state)) differs from the server's own log-probabilities by {:.3g} nats at {} positions".format(
                    worst, len(self._errors)
                ),
                "the final state is not the one before the final norm (pre- and post-norm mixed up, a partial sum), "
                "or model_path is another checkpoint than the server's",
            )

    def _together(self, alone: List[Alone]) -> None:
        """All prompts at once, until some were seen in one forward: each must be what it was alone, so the cuts are right."""
        for _ in range(TOGETHER_TRIES):
            with ThreadPoolExecutor(len(alone)) as pool:
                list(pool.map(self._as_alone, alone))
            if self.numbers.together > 1 or len(alone) < 2:
                return

    def _as_alone(self, one: Alone) -> None:
        name, ids, states = one
        try:
            self.exchange.wish(name)
            self._ask(name, ids, 0)
            path = self.exchange.wait(name, self.spec.dump_wait_s)
            prompts = prompts_in_forward(read_header(path))
            again = self._take(path, name, ids)["hidden_states"]
        except SampleFault as fault:
            raise self._refuse(
                "a prompt that may share its forward gave no dump: {}".format(fault.reason),
                "a forward that the capture cannot cut apart",
            ) from fault
        finally:
            self.exchange.forget(name)
        worst = max(quantile(row_error(states[:, slot], again[:, slot]), MOST) for slot in range(self.spec.states))
        self.numbers.together = max(self.numbers.together, prompts)
        self.numbers.together_difference = max(self.numbers.together_difference, worst)
        if worst > self.tolerance.state:
            raise self._refuse(
                "a prompt's states differ by {:.2g} (relative) when {} prompts share the forward".format(
                    worst, prompts
                ),
                "rows cut apart at the wrong place; run with hs_tokens_per_forward=0",
            )

    def _whole(self, name: str, ids: List[int]) -> None:
        """The longest sample, as the run itself will ask for it: shows truncation and chunked prefill before hours are spent."""
        self.numbers.longest = len(ids)
        try:
            self.exchange.wish(name)
            self._ask(name, ids, 0)
            self._take(self.exchange.wait(name, self.spec.dump_wait_s), name, ids)
        except SampleFault as fault:
            raise self._refuse(
                "the longest sample ({} tokens) did not come out whole: {}".format(len(ids), fault.reason),
                "a dump folder smaller than a sample"
                if "no space left" in fault.reason
                else "chunked prefill left on (--chunked-prefill-size -1), or a context shorter than the sample",
            ) from fault
        finally:
            self.exchange.forget(name)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _norm(self, state: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in float32: [T, H] -> [T, H]."""
        return state * torch.rsqrt(state.pow(2).mean(-1, keepdim=True) + self.checkpoint.eps) * weight

    def _slot_name(self, slot: int) -> str:
        if slot < len(self.spec.boundaries):
            return "boundary {}".format(self.spec.boundaries[slot])
        return "final state"

    def _refuse(self, saw: str, usually: str) -> CanaryRefused:
        return CanaryRefused(
            "the canary refuses: {}. That usually means: {}".format(saw, usually),
            "the data set: not one sample of it was extracted in this run",
            "start the extraction server as the reason says and run again",
        )


def row_error(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Relative L2 error of each row: [T, H], [T, H] -> [T]."""
    return (left - right).norm(dim=-1) / left.norm(dim=-1).clamp_min(1e-20)


def quantile(values: torch.Tensor, share: float) -> float:
    """The value that ``share`` of ``values`` do not exceed."""
    ordered = values.flatten().sort().values
    return float(ordered[max(int(share * len(ordered) + 0.999999) - 1, 0)])


def looks_normed(state: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether every row of ``state`` [T, H], divided by the norm's weight, has a root mean square of one: so it was normed."""
    usable = weight.abs() > 1e-6
    size = (state[:, usable] / weight[usable]).pow(2).mean(-1).sqrt()
    return bool(((size - 1).abs() < 0.02).to(torch.float32).mean() >= MOST)


def top_logprobs(meta: Dict[str, Any]) -> Dict[int, List[Tuple[int, float]]]:
    """The server's top log-probabilities: position in the prompt -> [(token, log-probability)]; position 0 has none."""
    found = {}
    for place, top in enumerate(meta.get("input_top_logprobs") or []):
        if place and top and len(top) > 1:
            found[place] = [(int(entry[1]), float(entry[0])) for entry in top]
    return found
