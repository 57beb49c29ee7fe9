"""The shipped capture without a server: states of a real size are put into its hooks as an engine's forward would. Engine's Python."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang_hs.dataset import sequence_name
from sglang_hs_capture.exchange import Exchange
from sglang_hs_capture.recorder import Recorder
from sglang_hs_capture.settings import Settings
from sglang_hs_capture.writer import Job

BOUNDARIES = (3, 31, 59)
HIDDEN = 7168
TOKENS = 2048
CPU = torch.device("cpu")


class Forward:
    """States of one prompt of ``tokens`` [T, H], bfloat16, as Kimi-K2.5 has them; ``run`` is a forward that computes nothing."""

    def __init__(self, tokens: int = TOKENS, hidden: int = HIDDEN) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = [
            torch.randn(tokens, hidden, generator=generator, dtype=torch.float32).to(torch.bfloat16)
            for _ in range(len(BOUNDARIES) + 1)
        ]
        self.tokens, self.hidden = tokens, hidden

    @property
    def size(self) -> int:
        """Bytes of the states."""
        return sum(state.numel() * state.element_size() for state in self.states)

    def ids(self, seed: int) -> list[int]:
        """A prompt that no other seed has."""
        return prompt(seed, self.tokens)

    def run(self, recorder: Recorder, ids: list[int]) -> str:
        """Every hook of one forward, in the engine's order. Returns the prompt's name."""
        name = sequence_name(ids)
        recorder.begin(batch(ids, name))
        assert recorder.current is not None and not recorder.current.problem, "the prompt is not wished for"
        for boundary, state in zip(BOUNDARIES, self.states):
            recorder.boundary(boundary, state)
        recorder.final((self.states[-1], None), (self.states[0], self.states[-1]))
        recorder.end()
        return name


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that no other seed has."""
    return random.Random(seed).choices(range(160000), k=tokens)


def batch(ids: list[int], name: str) -> Any:
    """What the engine tells of a forward of one prompt."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name="EXTEND"),
        input_ids=torch.tensor(ids),
        extend_seq_lens_cpu=[len(ids)],
        extend_prefix_lens_cpu=[0],
        num_token_non_padded_cpu=len(ids),
        rids=[name + "-1"],
    )


def recorder(folder: Path, hidden: int = HIDDEN, buffers: int = 2, device: torch.device = CPU) -> Recorder:
    """The capture, writing to ``folder``."""
    settings = Settings(folder, BOUNDARIES, "pre_norm", buffers)
    exchange = Exchange(folder, 0)
    exchange.prepare()
    return Recorder(settings, exchange, hidden, torch.bfloat16, device, "bench")


class Held:
    """Stands between recorder and writer: keeps the jobs, so that writing can be measured alone."""

    def __init__(self, made: Recorder) -> None:
        self.jobs: list[Job] = []
        self._writer = made.writer
        made.writer = self  # type: ignore[assignment]

    def put(self, job: Job) -> None:
        """Keep it."""
        self.jobs.append(job)

    def write(self, job: Job) -> None:
        """What the writer's thread does with a job, here."""
        for dump in job.dumps:
            self._writer._write(dump)


class Written:
    """Waits until the capture's pool has every slot back: nothing is on its way any more."""

    def __init__(self, made: Recorder, buffers: int = 2) -> None:
        self._pool, self._buffers = made.pool, buffers

    def wait(self) -> None:
        """Until it is so."""
        slots = [self._pool._free.get(timeout=120) for _ in range(self._buffers)]
        for slot in slots:
            self._pool.give_back(slot)


def wish(folder: Path, name: str) -> None:
    """Ask for the states of a sequence, as the client does."""
    (folder / "want" / name).write_text("")


def one_thread() -> None:
    """As the local server: its threads are counted, and the second core is the writer's and the client's."""
    torch.set_num_threads(1)
