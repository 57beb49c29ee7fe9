"""An engine small enough to break on purpose: a residual-stream model in SGLang's layouts, the real capture on it, real HTTP.

The layouts are those that the capture tells apart: A and B (``layer_communicator.prepare_attn``), C (``append``), D (``capture``,
the residual out of sight). Like the real kernels, the layers reuse the residual's storage, so a late copy shows.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from safetensors.torch import save_file
from sglang_hs_capture import hooks
from sglang_hs_capture.exchange import Exchange
from sglang_hs_capture.recorder import Recorder
from sglang_hs_capture.settings import Settings
from torch import nn

Prompt = Tuple[List[int], str, int]  # tokens that are computed, rid, tokens before them
Waiting = Tuple[Prompt, "Future[torch.Tensor]"]

VOCAB, HIDDEN, LAYERS, EPS = 64, 16, 5, 1e-6


class Norm(nn.Module):
    """RMSNorm with SGLang's two ways of being called; adds into ``residual``'s own storage as the fused kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x: torch.Tensor, residual: Optional[torch.Tensor] = None) -> Any:
        if residual is not None:
            residual.add_(x)
        whole = x if residual is None else residual
        normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + EPS) * self.weight
        return normed if residual is None else (normed, residual)


class Attention(nn.Module):
    """Mixes a token with those before it, so that a cut or a chunk changes the states."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.3)

    def forward(self, hidden_states: torch.Tensor, lengths: List[int]) -> torch.Tensor:
        parts = [part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None] for part in hidden_states.split(lengths)]
        return torch.tanh(torch.cat(parts) @ self.weight) * 2


class LayerBase(nn.Module):
    """What the layers of all layouts share."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.layer_communicator = SimpleNamespace(prepare_attn=self.prepare)

    def prepare(
        self, hidden: torch.Tensor, residual: Optional[torch.Tensor], forward_batch: Any
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self.input_layernorm(hidden), hidden.clone()
        normed, residual = self.input_layernorm(hidden, residual)
        return normed, residual


class LayerB(LayerBase):
    """Layouts A and B."""

    def forward(self, positions: Any, hidden_states: Any, forward_batch: Any, residual: Any) -> Any:
        hidden, residual = self.layer_communicator.prepare_attn(hidden_states, residual, forward_batch)
        return self.self_attn(hidden_states=hidden, lengths=forward_batch.extend_seq_lens_cpu), residual


class LayerC(LayerBase):
    """Layout C: the layer appends its live residual to a list that it is given."""

    def forward(
        self,
        positions: Any,
        hidden_states: Any,
        forward_batch: Any,
        residual: Any,
        captured_last_layer_outputs: Any = None,
    ) -> Any:
        hidden, residual = self.prepare(hidden_states, residual, forward_batch)
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.append(residual)
        return self.self_attn(hidden_states=hidden, lengths=forward_batch.extend_seq_lens_cpu), residual


class LayerD(LayerBase):
    """Layout D: the residual lives in the batch, the accumulator has ``capture``."""

    def forward(
        self, positions: Any, hidden_states: Any, forward_batch: Any, captured_last_layer_outputs: Any = None
    ) -> Any:
        hidden, forward_batch.stream = self.prepare(hidden_states, forward_batch.stream, forward_batch)
        if captured_last_layer_outputs is not None:
            captured_last_layer_outputs.capture(forward_batch.stream, owned=False)
        return self.self_attn(hidden_states=hidden, lengths=forward_batch.extend_seq_lens_cpu)


class Model(nn.Module):
    """Stands in for DeepseekV2Model. ``layout``: A, B, C or D."""

    def __init__(self, layout: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layout = layout
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(
            [{"A": LayerB, "B": LayerB, "C": LayerC, "D": LayerD}[layout]() for _ in range(LAYERS)]
        )
        self.norm = Norm()
        if layout != "A":
            self.layers_to_capture: List[int] = []

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None) -> torch.Tensor:
        hidden = self.embed_tokens(forward_batch.input_ids) if input_embeds is None else input_embeds
        residual = None
        forward_batch.stream = None
        for layer in self.layers:
            if self.layout == "D":
                hidden = layer(positions, hidden, forward_batch, captured_last_layer_outputs=None)
            elif self.layout == "C":
                hidden, residual = layer(positions, hidden, forward_batch, residual, captured_last_layer_outputs=None)
            else:
                hidden, residual = layer(positions, hidden, forward_batch, residual)
        hidden, _ = self.norm(hidden, forward_batch.stream if self.layout == "D" else residual)
        return hidden

    def reference(self, ids: List[int]) -> Tuple[List[torch.Tensor], torch.Tensor, torch.Tensor]:
        """(states before each layer, pre-norm final, post-norm final), computed the plain way."""
        with torch.no_grad():
            state, boundaries = self.embed_tokens(torch.tensor(ids)), []
            for layer in self.layers:
                boundaries.append(state.clone())
                state = state + layer.self_attn(layer.input_layernorm(state), [len(ids)])
            return boundaries, state, self.norm(state)


def batch(
    sequences: List[List[int]],
    rids: Optional[List[str]] = None,
    prefixes: Optional[List[int]] = None,
    mode: str = "EXTEND",
    padding: int = 0,
) -> Any:
    """A ForwardBatch of ``sequences`` (the tokens that are computed), laid end to end."""
    flat = [token for ids in sequences for token in ids]
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        input_ids=torch.tensor(flat + [0] * padding),
        extend_seq_lens_cpu=[len(ids) for ids in sequences[:-1]] + [len(sequences[-1])],
        extend_prefix_lens_cpu=prefixes or [0] * len(sequences),
        num_token_non_padded_cpu=len(flat),
        rids=rids,
    )


def capture(
    model: Model,
    folder: Path,
    boundaries: Tuple[int, ...] = (1, 3),
    final: str = "both",
    rank: int = 0,
    ranks: int = 1,
    buffers: int = 2,
) -> Recorder:
    """The real capture on ``model``, as attach() would put it there for this rank."""
    settings = Settings(folder, boundaries, final, buffers)
    exchange = Exchange(folder, rank)
    exchange.prepare()
    recorder = Recorder(settings, exchange, HIDDEN, torch.float32, torch.device("cpu"), "0.0-fake")
    layout = hooks.find_layout(model, settings)
    hooks.install(model, recorder, layout)
    exchange.attached(hooks.describe(model, recorder, layout, ranks))
    return recorder


def save_checkpoint(model: Model, head: torch.Tensor, folder: Path) -> None:
    """What the canary reads: config.json and the weights, named as Kimi-K2.5 names them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"language_model.lm_head.weight": head, "language_model.model.norm.weight": model.norm.weight.detach()}
    for index, layer in enumerate(model.layers):
        tensors["language_model.model.layers.{}.input_layernorm.weight".format(index)] = (
            layer.input_layernorm.weight.detach()
        )
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"text_config": {"rms_norm_eps": EPS, "vocab_size": VOCAB}}))


class Engine:
    """The HTTP side over one or more ranks. ``fault(number, ids, answer)`` may change or refuse the answer to request ``number``.

    ``pack``: prompts that come within a moment share a forward. ``cut``: tokens that the server takes in silence. ``lie``: it reports
    all of them all the same. ``cache``: prefixes are cached.
    """

    def __init__(
        self,
        folder: Path,
        layout: str = "D",
        ranks: int = 1,
        boundaries: Tuple[int, ...] = (1, 3),
        final: str = "pre_norm",
    ) -> None:
        torch.manual_seed(7)
        self.models = [Model(layout) for _ in range(ranks)]
        self.head = torch.randn(VOCAB, HIDDEN)
        self.dump = folder / "dump"
        self.checkpoint = folder / "model"
        save_checkpoint(self.models[0], self.head, self.checkpoint)
        self.recorders = [
            capture(model, self.dump, boundaries, final, rank, ranks) for rank, model in enumerate(self.models)
        ]
        self.pack = False
        self.cut: Optional[int] = None
        self.lie = False
        self.cache = False
        self.fault: Callable[[int, List[int], Dict[str, Any]], Tuple[int, Any]] = lambda number, ids, answer: (
            200,
            answer,
        )
        self.requests: List[List[int]] = []
        self._seen: List[List[int]] = []
        self._lock = threading.Lock()
        self._arrived: List[Waiting] = []
        self._arrival = threading.Lock()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = engine.generate(body) if self.path == "/generate" else (200, {})
                payload = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:{}".format(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def _forward(self, prompts: List[Prompt]) -> List[torch.Tensor]:
        """One forward of all ``prompts`` on every rank; rank 0's states of each."""
        hidden = torch.empty(0)
        for model in reversed(self.models):
            with torch.no_grad():
                hidden = model(None, None, batch(*(list(column) for column in zip(*prompts, strict=True))))
        return list(hidden.split([len(ids) for ids, _, _ in prompts]))

    def _with_others(self, prompt: Prompt) -> torch.Tensor:
        """Like a scheduler: who comes first computes for all that wait by then."""
        mine: Waiting = (prompt, Future())
        with self._arrival:
            self._arrived.append(mine)
        time.sleep(0.01)
        with self._lock:
            with self._arrival:
                at_hand, self._arrived = self._arrived, []
            if at_hand:
                for (_, answer), states in zip(at_hand, self._forward([each for each, _ in at_hand]), strict=True):
                    answer.set_result(states)
        return mine[1].result(timeout=10)

    def generate(self, body: Dict[str, Any]) -> Tuple[int, Any]:
        """One prompt through every rank, one at a time as a scheduler would."""
        ids: List[int] = body["input_ids"]
        with self._lock:
            number = len(self.requests)
            self.requests.append(ids)
            taken = ids[: self.cut]
            prefix = len(taken) - 1 if self.cache and taken in self._seen else 0
            self._seen.append(taken)
            hidden = torch.empty(0)
            if not self.pack:
                hidden = self._forward([(taken[prefix:], body["rid"], prefix)])[0]
        if self.pack:
            hidden = self._with_others((taken[prefix:], body["rid"], prefix))
        meta: Dict[str, Any] = {
            "prompt_tokens": len(ids) if self.lie else len(taken),
            "cached_tokens": 0 if self.lie else prefix,
        }
        if body.get("return_logprob") and not prefix:
            chances = torch.log_softmax(hidden @ self.head.T, -1)[:-1].topk(body["top_logprobs_num"])
            tops = [
                [[float(value), int(token), None] for value, token in zip(*pair, strict=True)]
                for pair in zip(chances.values, chances.indices, strict=True)
            ]
            meta["input_top_logprobs"] = [None, *tops]
        return self.fault(number, ids, {"output_ids": [1], "meta_info": meta})
