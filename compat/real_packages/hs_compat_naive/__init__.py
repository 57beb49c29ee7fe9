"""The mistake that the capture avoids, made on purpose: ``hidden_states + residual`` before the layer, under all-reduce fusion.

The canary must refuse it. Layouts A and B; the others never had this place.
"""

from __future__ import annotations

import importlib
from typing import Any

importlib.import_module("hs_compat_fused")
hooks: Any = importlib.import_module("sglang_hs_capture.hooks")


def _take_the_naive_sum(communicator: Any, recorder: Any, boundary: int) -> None:
    original = communicator.prepare_attn

    def prepare_attn(hidden_states: Any, residual: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.boundary(boundary, hidden_states.clone() if residual is None else hidden_states + residual)
        return original(hidden_states, residual, *args, **kwargs)

    communicator.prepare_attn = prepare_attn


if not hasattr(hooks, "_wrap_prepare_attn"):
    raise RuntimeError("the capture takes the state otherwise than when this was written")
hooks._wrap_prepare_attn = _take_the_naive_sum
