"""What the sources of all releases take from elsewhere to be imported, built and run by one process on a CPU: nothing of it computes."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, List

import torch
from torch import nn

from . import tiny


class Recorder:
    """Stands for the expert distribution recorder: remembers in which order the layers ran."""

    def __init__(self) -> None:
        self.layers: List[int] = []

    @contextlib.contextmanager
    def with_current_layer(self, layer: int) -> Iterator[None]:
        """Around each layer."""
        self.layers.append(layer)
        yield


class Allocator:
    """Stands for BumpAllocator."""

    def __init__(self, buffer_size: int, dtype: torch.dtype, device: Any) -> None:
        self.size = buffer_size


class Proxy(dict):
    """Stands for PPProxyTensors: with one stage none is ever made."""


class Facts(SimpleNamespace):
    """A group of settings; one that is not here raises."""


class Forward(Facts):
    """Stands for get_forward(): the flags of one forward."""

    def set(self, name: str, value: Any) -> None:
        """For good."""
        assert name in vars(self), name
        setattr(self, name, value)

    @contextlib.contextmanager
    def scoped(self, **flags: Any) -> Iterator[None]:
        """For a while."""
        before = {name: getattr(self, name) for name in flags}
        vars(self).update(flags)
        yield
        vars(self).update(before)


def make_layers(count: int, factory: Callable[..., Any], *_args: Any, prefix: str = "", **_more: Any) -> Any:
    """Stands for make_layers on one stage: (layers, 0, count)."""
    stack = getattr(sys.modules.get("sglang.srt.layers.layer_boundary"), "layer_stack", contextlib.nullcontext)
    with stack():  # from 0.5.22 on layers connect to their neighbours while they are built
        layers = nn.ModuleList([factory(idx=index, prefix="{}.{}".format(prefix, index)) for index in range(count)])
    return layers, 0, count


def no(*_args: Any, **_more: Any) -> bool:
    """Any question that is answered with no: no GPU, no parallelism, no optional kernel."""
    return False


def one(*_args: Any, **_more: Any) -> int:
    """The size of every group."""
    return 1


def zero(*_args: Any, **_more: Any) -> int:
    """The rank in every group."""
    return 0


def nothing(*_args: Any, **_more: Any) -> None:
    """A call without an effect here."""


def identity(*args: Any, **_more: Any) -> Any:
    """A decorator, bare or with arguments, that changes nothing."""
    return args[0] if args and callable(args[0]) else identity


# Questions with the answer no: there is no GPU, no parallelism, no optional kernel.
NO = """
    is_cuda is_hip is_npu is_cpu is_fp8_fnuz is_sm90_supported is_sm100_supported is_gfx95_supported is_gfx1250_supported
    is_flashinfer_available is_nvidia_cublas_cu12_version_ge_12_9 cpu_has_amx_support use_intel_amx_backend get_bool_env_var
    is_dp_attention_enabled is_nsa_enable_prefill_cp is_dsa_enable_prefill_cp is_prefill_context_parallel_enabled
    enable_prefill_cp nsa_use_prefill_cp dsa_use_prefill_cp mla_use_prefill_cp is_mla_prefill_cp_enabled is_mla_cp_enabled
    is_mla_cp_active is_cp_v2_active is_enable_moe_cp_allgather is_deepseek_dsa is_deepseek_nsa is_deepep_class_backend
    check_cuda_graph_backend uses_cutedsl_ar_fusion
""".split()
FLAGS = """
    _is_cuda _is_hip _is_npu _is_cpu _is_xpu _is_musa _use_aiter _use_aiter_gfx95 _is_gfx95_supported _is_cpu_amx_available
    _use_aiter_bpreshuffle_gfx95
""".split()
SWITCHES = ("SGLANG_NPU_USE_MULTI_STREAM", "SGLANG_ROCM_USE_MULTI_STREAM", "SGLANG_USE_AG_AFTER_QLORA")


def supplied(release: str, recorder: Recorder) -> Dict[str, Any]:
    """Name -> value, wherever a release imports the name from. recorder: is told which layers run."""
    group = Facts(is_first_rank=True, is_last_rank=True, rank_in_group=0, world_size=1)
    parallel = Facts(
        pp_group=group,
        tp_size=1,
        attn_tp_size=1,
        tp_rank=0,
        attn_tp_rank=0,
        attn_cp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        moe_ep_size=1,
        moe_tp_size=1,
        moe_dp_size=1,
        moe_ep_rank=0,
        enable_dp_attention=False,
        attn_dp_enabled=False,
        attn_cp_size=1,
        enable_prefill_cp=False,
        enable_attn_tp_input_scattered=False,
    )
    arguments = Facts(
        moe_dense_tp_size=None,
        speculative_algorithm=None,
        enable_dp_attention=False,
        enable_attn_tp_input_scattered=False,
        enable_piecewise_cuda_graph=False,
        disable_piecewise_cuda_graph=True,
    )
    parallel.moe_dense_tp_size = None
    forward = Forward(
        attn_input_scattered=False,
        attn_inputs=None,
        fuse_mlp_allreduce=False,
        mlp_reduce_scatter=False,
        moe_output_buffer=None,
        sp_active=False,
        defer_moe_finalize=False,
    )
    off = Facts(backend="disabled")
    settings = Facts(
        comm=Facts(
            boundary_reduction="ar",
            enable_quant_communications=False,
            enable_aiter_allreduce_fusion=False,
            flashinfer_allreduce_fusion_backend=None,
        ),
        overlap=Facts(enable_two_batch_overlap=False),
        graph=Facts(cuda_graph_config=Facts(prefill=off, decode=off)),
    )
    values: Dict[str, Any] = {
        "__version__": release,
        **{name: no for name in NO},
        **{name: False for name in FLAGS},
        "get_device_sm": zero,
        "get_int_env_var": zero,
        "add_prefix": lambda name, prefix: "{}.{}".format(prefix, name) if prefix else name,
        "register_custom_op": identity,
        "envs": Facts(**{name: Facts(get=no) for name in SWITCHES}),
        "make_layers": make_layers,
        "make_pp_layers": make_layers,
        "RMSNorm": tiny.Norm,
        "VocabParallelEmbedding": tiny.Embedding,
        "BumpAllocator": Allocator,
        "PPProxyTensors": Proxy,
        "get_pp_group": lambda: group,
        "get_parallel": lambda: parallel,
        "get_forward": lambda: forward,
        "get_flags": lambda: Facts(moe=Facts(in_speculative_scope=False)),
        "get_exec": lambda: settings,
        "get_spec": lambda: Facts(speculative_algorithm=None),
        "get_global_expert_distribution_recorder": lambda: recorder,
        "get_moe_a2a_backend": lambda: Facts(is_deepep=no, is_deepep_v2=no, is_mooncake=no),
        "SpeculativeAlgorithm": Facts(from_string=lambda _name: None),
        "get_embedding_tp_kwargs": dict,
        "global_server_args_dict": vars(arguments),
        "get_global_server_args": lambda: arguments,
        "get_server_args": lambda: arguments,
        "Phase": Facts(PREFILL="prefill", DECODE="decode"),
        "Backend": Facts(TC_PIECEWISE="tc_piecewise"),
        "layernorm_sp": Facts(layernorm_sp_enabled=no),
        "maybe_prefetch_next_full_attention_kv": nothing,
    }
    ranks = "attention_tp attention_cp moe_cp tensor_model_parallel"
    sizes = "attention_tp attention_cp attention_dp local_attention_dp moe_cp"
    values.update({"get_{}_rank".format(name): zero for name in ranks.split()})
    values.update({"get_{}_size".format(name): one for name in sizes.split()})
    values["get_tensor_model_parallel_world_size"] = one
    return values
