"""A model small enough to know: layers whose residual sums are whole numbers, and what the release's source needs around them.

The state before layer i is known exactly, because everything that is added is a small whole number that float32 holds::

    state = embedding[token]
    state = state + attention[i][token] + sign(state)       # the layer sees norm(state), of which the sign is left
    state = state + mlp[i][token] + sign(state)

As in the real kernels, a norm with a residual adds into the residual's own storage and writes its result over the input.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from torch import nn

VOCAB, HIDDEN, LAYERS, EPS = 32, 8, 5, 1e-6
SEQUENCES = [[5, 6, 7, 8, 9], [1, 2], [3], [11, 12, 13]]
OWN_CAPTURE = [1, 3]  # the boundaries that the model's own capture is asked for


def table(*shape: int, seed: int) -> torch.Tensor:
    """Whole numbers from -8 to 8, the same in every run."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


EMBEDDING = table(VOCAB, HIDDEN, seed=1)
ATTENTION = table(LAYERS, VOCAB, HIDDEN, seed=2)
MLP = table(LAYERS, VOCAB, HIDDEN, seed=3)


class Reference(NamedTuple):
    """What must come out for one sequence. boundaries: [LAYERS, T, H], pre: [T, H], post: [T, H], all float64."""

    boundaries: torch.Tensor
    pre: torch.Tensor
    post: torch.Tensor


def reference(ids: List[int]) -> Reference:
    """The states of ``ids``, computed with nothing of the release and nothing of the capture."""
    tokens = torch.tensor(ids)
    state = EMBEDDING[tokens].double()
    boundaries = []
    for layer in range(LAYERS):
        boundaries.append(state)
        state = state + ATTENTION[layer][tokens].double() + state.sign()
        state = state + MLP[layer][tokens].double() + state.sign()
    post = state / (state.pow(2).mean(-1, keepdim=True) + EPS).sqrt()
    return Reference(torch.stack(boundaries), state, post)


class Norm(nn.Module):
    """RMSNorm with weights of one, with both of SGLang's ways to be called; in place like the fused kernels."""

    def __init__(self, hidden_size: int, eps: float = EPS, **_options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * self.weight

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None, addition: Any = None) -> Any:
        """Norm of x, or (norm of x + residual, x + residual)."""
        assert addition is None
        if residual is None:
            return self._normed(x)
        residual.add_(x)
        x.copy_(self._normed(residual))
        return x, residual


class Embedding(nn.Module):
    """Stands for VocabParallelEmbedding."""

    def __init__(self, count: int, width: int, **_options: Any) -> None:
        super().__init__()
        assert (count, width) == (VOCAB, HIDDEN)
        self.weight = nn.Parameter(EMBEDDING.clone())
        self.embedding_dim = width

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> a fresh [T, H]."""
        return self.weight[ids].clone()


class Attention(nn.Module):
    """Stands for the attention of one layer; gives the answer with the layer's table added."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: torch.Tensor, forward_batch: Any, **_more: Any) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        self.ids = forward_batch.input_ids
        return ATTENTION[self.layer][self.ids] + hidden_states.sign()

    def maybe_use_decode_attn_tp(self, forward_batch: Any) -> Any:
        """Of 0.5.17 and later: nothing here decodes."""
        return contextlib.nullcontext()


def tiny_mlp(real: type) -> type:
    """A stand-in for the release's dense MLP that takes exactly the arguments of the real one."""

    class Mlp(real):
        """The layer looks whether its MLP is the dense one."""

        def __init__(self, attention: Attention) -> None:
            nn.Module.__init__(self)
            self.before = [attention]  # in a list: no part of this module

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            """[T, H] -> [T, H]."""
            given = SIGNATURE.bind(self, *args, **kwargs).arguments
            for flag in ("should_allreduce_fusion", "use_reduce_scatter"):
                assert not given.get(flag), flag
            attention = self.before[0]
            return MLP[attention.layer][attention.ids] + given["x"].sign()

    SIGNATURE = inspect.signature(real.forward)  # type: ignore[attr-defined]
    return Mlp


def called(function: Callable[..., Any], known: Dict[str, Any]) -> Any:
    """``function`` with those of the ``known`` arguments that it takes; one that it needs and nobody knows raises."""
    names = inspect.signature(function).parameters
    return function(**{name: known[name] for name in names if name in known})


def tiny_layer(release: Any) -> type:
    """The release's own decoder layer, its forward untouched, with the tiny attention, MLP and norms in it.

    release: the module of the release's deepseek_v2.py. What is between attention and MLP is the release's own too:
    its LayerCommunicator, or, from 0.5.21, its stage boundaries and residual stream.
    """
    mlp = tiny_mlp(release.DeepseekV2MLP)

    class Layer(release.DeepseekV2DecoderLayer):
        """Only ``__init__`` is replaced: it would make real weights."""

        def __init__(self, config: Any, layer_id: int, *_args: Any, **kwargs: Any) -> None:
            nn.Module.__init__(self)
            self.config = config
            self.layer_id = layer_id
            self.hidden_size = config.hidden_size
            self.is_nextn = False
            self.is_layer_sparse = False
            self.enable_dp_attention = False
            self.nsa_enable_prefill_cp = self.dsa_enable_prefill_cp = self.mla_enable_prefill_cp = False
            self._gfx95_quant_format = ""
            self._stage_enters_stack = layer_id == 0
            self._stage_terminal = layer_id == LAYERS - 1
            self._stage_previous_sparse = self._stage_next_sparse = False
            self.self_attn = Attention(layer_id)
            self.mlp = mlp(self.self_attn)
            self.input_layernorm = Norm(config.hidden_size)
            self.post_attention_layernorm = Norm(config.hidden_size)
            if hasattr(self, "_build_stages"):
                self.attn_boundary, self.ffn_boundary = self._build_stages(
                    input_layernorm=self.input_layernorm,
                    post_attention_layernorm=self.post_attention_layernorm,
                    qkv_latent_func=None,
                )
                return
            known = {
                "layer_id": layer_id,
                "num_layers": LAYERS,
                "is_layer_sparse": False,
                "is_previous_layer_sparse": False,
                "is_next_layer_sparse": False,
                "input_layernorm": self.input_layernorm,
                "post_attention_layernorm": self.post_attention_layernorm,
                "is_last_layer": layer_id == LAYERS - 1,
                "allow_reduce_scatter": True,
            }
            communicator = sys.modules[release.LayerCommunicator.__module__]
            facts = inspect.signature(communicator._LayerModeComputationContext).parameters
            modes = release.LayerScatterModes.init_new(**{name: known[name] for name in facts if name in known})
            known["layer_scatter_modes"] = self.layer_scatter_modes = modes
            self.layer_communicator = called(release.LayerCommunicator, known)

    return Layer


class Mode:
    """Stands for ForwardMode.EXTEND; whatever else is asked of it raises."""

    name = "EXTEND"

    def is_idle(self) -> bool:
        """No."""
        return False

    def is_extend(self, *_options: Any, **_more: Any) -> bool:
        """Yes."""
        return True

    def is_context_parallel_extend(self, *_options: Any, **_more: Any) -> bool:
        """Yes, of a kind that could be; whether it is, is asked elsewhere."""
        return True

    def is_decode(self) -> bool:
        """No."""
        return False


def batch(rids: Optional[List[str]] = None) -> Any:
    """A ForwardBatch of SEQUENCES, end to end; an attribute that is not here raises."""
    flat = [token for ids in SEQUENCES for token in ids]
    return SimpleNamespace(
        forward_mode=Mode(),
        input_ids=torch.tensor(flat),
        extend_seq_lens_cpu=[len(ids) for ids in SEQUENCES],
        extend_prefix_lens_cpu=[0] * len(SEQUENCES),
        num_token_non_padded_cpu=len(flat),
        rids=rids,
        can_run_tbo=False,
        residual_stream=None,
        spec_info=None,
        attn_cp_metadata=None,
    )


class Config(SimpleNamespace):
    """The model's config.json; a field that is not here raises, as it does there."""


def config() -> Config:
    """Of the tiny model: dense layers only."""
    return Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        rms_norm_eps=EPS,
        pad_token_id=0,
        first_k_dense_replace=LAYERS,
        moe_layer_freq=1,
        qk_rope_head_dim=4,
        n_routed_experts=None,
        num_experts_per_tok=1,
        architectures=["DeepseekV3ForCausalLM"],
    )
