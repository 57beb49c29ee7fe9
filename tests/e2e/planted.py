"""Faults planted in the capture of a real engine: a test puts this file into its own copy of the package, never into the shipped one.

The copy's ``attach`` is this one. Which fault is at work is read before each use from the file ``planted.now`` beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import torch
from sglang_hs_capture import hooks

SWITCH = Path(__file__).with_name("planted.now")
SHIFTED = 2  # the boundary that "off_by_one" takes one layer late


def at_work() -> str:
    """Name of the fault, empty for none."""
    return SWITCH.read_text() if SWITCH.exists() else ""


def attach(model: Any) -> None:
    """The shipped capture, and the faults around it."""
    hooks.attach(model)
    recorder = hooks._attached
    assert recorder is not None
    _partial_sum(recorder)
    _wrong_norm(recorder)
    _off_by_one(model, recorder)


def _partial_sum(recorder: Any) -> None:
    """A boundary in which the last all-reduce has not happened: this rank's own share instead of the sum."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    reduce, whole_boundary = GroupCoordinator.all_reduce, recorder.boundary
    last: List[torch.Tensor] = []

    def all_reduce(self: Any, share: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mine = share.clone()  # the sum may come in the same memory
        whole = reduce(self, share, *args, **kwargs)
        last[:] = [mine, whole.clone()]
        return whole

    def boundary(index: int, state: Any) -> None:
        if at_work() == "partial_sum_{}".format(recorder.exchange.rank):
            mine, whole = last
            state = state - whole + mine
        whole_boundary(index, state)

    GroupCoordinator.all_reduce = all_reduce
    recorder.boundary = boundary


def _wrong_norm(recorder: Any) -> None:
    """The normed state handed out as the one before the norm."""
    original = recorder.final

    def final(args: Any, output: Any) -> None:
        if at_work() == "wrong_norm":
            normed = output[0] if isinstance(output, (tuple, list)) else output
            output = (normed, normed.clone())
        original(args, output)

    recorder.final = final


def _off_by_one(model: Any, recorder: Any) -> None:
    """The state before the next layer handed out as the one before this layer."""
    collect = hooks._collect(recorder, SHIFTED)

    def next_layer(module: Any, args: Any, kwargs: Any) -> Any:
        return collect(module, args, kwargs) if at_work() == "off_by_one" else None

    model.layers[SHIFTED + 1].register_forward_pre_hook(next_layer, with_kwargs=True)
