"""All-reduce fusion on a CPU: the engine's own decision to defer a sum to the next layer's norm is made to say yes.

On a GPU with the fusion a layer leaves a partial sum per rank, and one kernel of the next layer sums it over the ranks, adds the
residual and norms. Here the conditions of hardware and packages are answered with yes, all others stay the engine's own, and
the kernel is plain torch. What a naive ``hidden_states + residual`` on this rank would have been off by is measured at that very
place, and written to the file that HS_COMPAT_PROOF names with ``{rank}`` in it.
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch

MARK = "_sglang_needs_allreduce_fusion"
seen = {"sums": 0, "naive_off": 0.0}


def fused(
    self: Any, x: torch.Tensor, residual: Any = None, post_residual_addition: Any = None, use_attn_tp_group: bool = True
) -> Any:
    """Sum ``x`` [T, H] over the ranks, add ``residual`` [T, H], norm: (normed, the new residual)."""
    distributed = importlib.import_module("sglang.srt.distributed")
    if residual is None or post_residual_addition is not None:
        raise RuntimeError("a call of the fused norm that no release made when this was written")
    deferred = getattr(x, MARK, False) or not use_attn_tp_group  # by the layer before, not by this layer's attention
    whole = distributed.tensor_model_parallel_all_reduce(x.clone())
    if deferred:
        seen["sums"] += 1
        seen["naive_off"] = max(seen["naive_off"], float((x - whole).abs().max()))
        rank = torch.distributed.get_rank()  # there is nothing but tensor parallelism
        Path(os.environ["HS_COMPAT_PROOF"].format(rank=rank)).write_text(json.dumps(seen), encoding="utf-8")
    return self.forward_native(whole, residual.clone())


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _small(rows: int) -> bool:
    """The kernel's own limit."""
    return 0 < rows <= 2048


def _answers() -> list[tuple[Any, str, Any]]:
    """(module, name, new value) of what this release decides by."""
    names = (
        "sglang.srt.layers.communicator",
        "sglang.srt.models.deepseek_v2",
        "sglang.srt.layers.layer_boundary.residual.add_norm",
        "sglang.srt.layers.layer_boundary.fusions.allreduce",
        "sglang.srt.layers.layer_boundary.exit",
    )
    places = [place for place in map(_module, names) if place is not None]
    asked = ("apply_flashinfer_allreduce_fusion", "flashinfer_ar_fusion_applies")
    found = [(place, name, _small) for place in places for name in asked if hasattr(place, name)]
    if found:
        return found
    # before 0.5.10 no function is asked: hardware and package are constants, and the operator's flag decides
    constants = ("_is_sm100_supported", "_is_flashinfer_available")
    return [(place, name, True) for place in places for name in constants if hasattr(place, name)]


importlib.import_module("sglang.srt.layers.layernorm").RMSNorm.forward_with_allreduce_fusion = fused
answers = _answers()
if not answers:
    raise RuntimeError("this release decides on the fusion in a place that is not known here")
for place, name, value in answers:
    setattr(place, name, value)
