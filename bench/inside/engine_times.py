"""Imported by a real server's scheduler (SGL_CPU_EXTRA): writes down when each forward begins and ends, and when there is nothing to do.

It wraps the model's call from outside, hooks included, with and without a capture alike. One line each in ``$HS_BENCH_LOG``:
``forward TOKENS BEGIN END`` and ``idle BEGIN END``, in seconds of the monotonic clock.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any


def time_forwards(model_class: Any, log: Any) -> None:
    """Every call of the model that is not a decode step."""
    inner = model_class.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = kwargs["forward_batch"] if "forward_batch" in kwargs else args[2]
        begin = time.monotonic()
        result = inner(self, *args, **kwargs)
        if batch.forward_mode.is_extend():
            log.write(f"forward {batch.input_ids.numel()} {begin:.6f} {time.monotonic():.6f}\n")
        return result

    model_class.__call__ = call


def time_idleness(scheduler_class: Any, log: Any) -> None:
    """From the moment in which the scheduler finds no prompt to work on until it finds one."""
    inner = scheduler_class.get_next_batch_to_run
    since: list[float] = []

    def get_next_batch_to_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        plan = inner(self, *args, **kwargs)
        batch = getattr(plan, "batch_to_run", plan)  # newer releases wrap it
        if batch is None and not since:
            since.append(time.monotonic())
        elif batch is not None and since:
            log.write(f"idle {since.pop():.6f} {time.monotonic():.6f}\n")
        return plan

    scheduler_class.get_next_batch_to_run = get_next_batch_to_run


if os.environ.get("HS_BENCH_LOG"):
    _log = open(os.environ["HS_BENCH_LOG"], "a", buffering=1)
    time_forwards(importlib.import_module("sglang.srt.models.deepseek_v2").DeepseekV2Model, _log)
    time_idleness(importlib.import_module("sglang.srt.managers.scheduler").Scheduler, _log)
