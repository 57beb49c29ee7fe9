"""What the helper must know of the engine around it, on every release: ranks, release, and the layouts that it refuses.

SGLang moved its process-wide arguments three times; each question here tries the places newest first.
"""

from __future__ import annotations

import importlib
from typing import Any, Dict, List, Optional, Tuple

import torch


def _call(module: str, name: str) -> Any:
    """``module.name()``, or None where this release has no such thing (or it is not ready yet)."""
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception:
        return None


def _attribute(holder: Any, name: str) -> Any:
    """``holder.name`` or None: the holders of newer releases raise errors of their own for unknown names."""
    try:
        return getattr(holder, name, None)
    except Exception:  # see above
        return None


def server_argument(name: str) -> Any:
    """The value of a server argument that is in effect, None where this release knows no such argument."""
    context = _call("sglang.srt.runtime_context", "get_context")
    try:
        value = context.config_leaf(name)  # the resolved value; get_server_args() there is what the operator typed
        if value is not None:
            return value
    except Exception:  # an older release, or a name that this one does not know
        context = None
    for module, getter in (
        ("sglang.srt.runtime_context", "get_parallel"),
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        value = _attribute(_call(module, getter), name)
        if value is not None:
            return value
    try:
        return importlib.import_module("sglang.srt.managers.schedule_batch").global_server_args_dict.get(name)
    except Exception:
        return None


def release() -> str:
    """Version of the sglang package, "unknown" where it does not say."""
    try:
        return str(importlib.import_module("sglang").__version__)
    except Exception:
        return "unknown"


def tensor_parallel() -> Tuple[int, int]:
    """(rank, size) of the tensor-parallel group; (0, 1) outside an engine."""
    rank = _call("sglang.srt.distributed", "get_tensor_model_parallel_rank")
    size = _call("sglang.srt.distributed", "get_tensor_model_parallel_world_size")
    if rank is None or size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1
    return int(rank), int(size)


def _number(name: str) -> int:
    value = server_argument(name)
    return int(value) if isinstance(value, (int, bool)) else 0


def _prefill_graph() -> Optional[str]:
    """The argument that leaves prefill CUDA graphs on, None where they are off or this release has none."""
    config = server_argument("cuda_graph_config")
    backend = getattr(getattr(config, "prefill", None), "backend", None)
    if backend is not None:
        name = str(getattr(backend, "value", backend)).lower()
        return None if name == "disabled" else "the prefill CUDA graph (backend {})".format(name)
    if (
        server_argument("disable_piecewise_cuda_graph") is False
        or server_argument("enable_piecewise_cuda_graph") is True
    ):
        return "the piecewise CUDA graph"
    return None


def _a2a_backend() -> str:
    """Name of the all-to-all MoE backend, "none" where experts stay on their rank: a word, None, or 0.4.10's enum ("standard", "none")."""
    given = server_argument("moe_a2a_backend")
    value = getattr(given, "value", given)
    names = value if isinstance(value, tuple) else (value,)
    return "none" if None in names or "none" in names else str(names[0])


def refusals(model: Any, device: str) -> List[str]:
    """Why this server's layout cannot be captured; empty where it can. ``device``: type of the weights' device."""
    found = []
    group = getattr(model, "pp_group", None)
    if int(getattr(group, "world_size", 1) or 1) > 1 or _number("pp_size") > 1:
        found.append("pipeline parallelism (pp_size > 1): a rank holds only some of the layers; start with --pp-size 1")
    if (
        _number("enable_dp_attention")
        or _number("attn_dp_size") > 1
        or _call("sglang.srt.layers.dp_attention", "is_dp_attention_enabled") is True
    ):
        found.append("DP attention scatters the tokens over the ranks; start without --enable-dp-attention")
    if _number("dp_size") > 1:
        found.append(
            "data parallelism (dp_size > 1): several models would write into one folder; start with --dp-size 1"
        )
    context = any(getattr(model, name, False) for name in ("nsa_enable_prefill_cp", "dsa_enable_prefill_cp"))
    names = (
        "enable_nsa_prefill_context_parallel",
        "enable_dsa_prefill_context_parallel",
        "enable_prefill_context_parallel",
        "enable_prefill_cp",
    )
    if context or _number("attn_cp_size") > 1 or any(_number(name) for name in names):
        found.append("context parallelism scatters the tokens over the ranks; start without it")
    backend = _a2a_backend()
    if getattr(model, "enable_a2a_moe", False) or _number("enable_deepep_moe") or backend != "none":
        found.append(
            "an all-to-all MoE backend ({}) scatters the tokens over the ranks; start with --moe-a2a-backend none".format(
                backend
            )
        )
    if _number("enable_two_batch_overlap"):
        found.append("two-batch overlap goes around the layers' forward; start without --enable-two-batch-overlap")
    graph = _prefill_graph() if device == "cuda" else None
    if graph:
        found.append("{} replays a prefill without running its Python; disable it".format(graph))
    return found


def settings_in_effect() -> Dict[str, Any]:
    """The server arguments that decide whether a capture is whole, as this release tells them; for the record."""
    parallel = ("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "moe_a2a_backend")
    schedule = ("enable_two_batch_overlap", "disable_radix_cache", "chunked_prefill_size", "max_running_requests")
    names = (*parallel, *schedule, "attention_backend", "dtype")
    found = {name: server_argument(name) for name in names}
    return {
        name: value if isinstance(value, (int, float)) else str(value)
        for name, value in found.items()
        if value is not None
    }


def graph_capture_running() -> bool:
    """Whether a CUDA graph is being captured right now: nothing may be copied or synchronised then."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
