"""Puts the capture on a model: torch's own hooks on the instances, chosen by what the layers of this release look like."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any, Dict, Optional

import torch

from . import engine
from .exchange import Exchange
from .recorder import Recorder
from .settings import Settings, from_environment, helper_sha256

log = logging.getLogger("sglang_hs_capture")

CAPTURE = "captured_last_layer_outputs"  # the layer's own capture argument, from 0.5.14

_attached: Optional[Recorder] = None


class Collector:
    """Stands in for the list that a layer appends its input state to, and passes everything on to the model's own list.

    Layout C calls ``append``, layout D ``capture``; both may lend storage that the layer overwrites, hence copies at once.
    """

    copies_on_append = True

    def __init__(self, recorder: Recorder, boundary: int, inner: Any) -> None:
        self._recorder = recorder
        self._boundary = boundary
        self._inner = inner

    def append(self, state: Any) -> None:
        """Layout C: a state that may be the layer's own live tensor."""
        self._recorder.boundary(self._boundary, state)
        if self._inner is not None:
            self._inner.append(state)

    def capture(self, state: Any, *, owned: bool = False) -> None:
        """Layout D: ``owned`` tells the model's own accumulator whether it may keep the storage."""
        self._recorder.boundary(self._boundary, state)
        if self._inner is not None:
            self._inner.capture(state, owned=owned)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return 0 if self._inner is None else len(self._inner)

    def __bool__(self) -> bool:
        return True  # somebody wants the state, also while nothing is collected yet


def attach(model: Any) -> None:
    """Called at the end of ``DeepseekV2Model.__init__``. Raises RuntimeError, so that the server does not start, if it must refuse."""
    global _attached
    rank, size = engine.tensor_parallel()
    exchange: Optional[Exchange] = None
    try:
        settings = from_environment(os.environ)
        exchange = Exchange(settings.dump_dir, rank)
        exchange.prepare()
        if _attached is not None:
            raise ValueError("a second model in this process (a draft model?): start without speculative decoding")
        norm = getattr(model, "norm", None)
        weight = getattr(norm, "weight", None)
        if weight is None:
            raise ValueError("the model has no final norm on this rank")
        reasons = engine.refusals(model, weight.device.type)
        if reasons:
            raise ValueError("; ".join(reasons))
        layout = find_layout(model, settings)
        dtype = torch.get_default_dtype()  # the engine builds its models under the type that it serves them in
        recorder = Recorder(settings, exchange, int(weight.shape[0]), dtype, weight.device, engine.release())
        install(model, recorder, layout)
        _attached = recorder
        exchange.attached(describe(model, recorder, layout, size))
    except Exception as error:
        reason = "sglang_hs_capture refuses this server: {}".format(error)
        log.error(reason)
        if exchange is not None:
            exchange.refused(str(error))
        raise RuntimeError(reason) from error


def find_layout(model: Any, settings: Settings) -> str:
    """A, B, C or D (the four shapes of the layer loop, see docs/design.md); ValueError for anything else."""
    layers = getattr(model, "layers", None)
    if layers is None or not len(layers):
        raise ValueError("the model has no layers")
    if settings.boundaries[-1] >= len(layers):
        raise ValueError(
            "boundary {} is asked for, the model's last one is {}".format(settings.boundaries[-1], len(layers) - 1)
        )
    if "forward_batch" not in inspect.signature(model.forward).parameters:
        raise ValueError("the model's forward takes no forward_batch: an unknown layout of this SGLang release")
    captures = set()
    for boundary in settings.boundaries:
        layer = layers[boundary]
        names = inspect.signature(layer.forward).parameters if hasattr(layer, "forward") else {}
        if CAPTURE in names:
            captures.add("C" if "residual" in names else "D")
        elif "residual" in names and callable(
            getattr(getattr(layer, "layer_communicator", None), "prepare_attn", None)
        ):
            captures.add("B" if hasattr(model, "layers_to_capture") else "A")
        else:
            raise ValueError(
                "layer {} has neither {} nor layer_communicator.prepare_attn: an unknown layout".format(
                    boundary, CAPTURE
                )
            )
    if len(captures) != 1:
        raise ValueError("the layers differ in layout: {}".format(", ".join(sorted(captures))))
    return captures.pop()


def install(model: Any, recorder: Recorder, layout: str) -> None:
    """Register the hooks. Each returns None, so torch leaves arguments and outputs as they are (a layer's collector excepted)."""
    place = list(inspect.signature(model.forward).parameters).index("forward_batch")

    def before_model(module: Any, args: Any, kwargs: Dict[str, Any]) -> None:
        recorder.begin(kwargs["forward_batch"] if "forward_batch" in kwargs else args[place])

    def after_model(module: Any, args: Any, kwargs: Dict[str, Any], output: Any) -> None:
        recorder.end()

    def after_norm(module: Any, args: Any, output: Any) -> None:
        recorder.final(args, output)

    for boundary in recorder.settings.boundaries:
        layer = model.layers[boundary]
        if layout in ("C", "D"):
            layer.register_forward_pre_hook(_collect(recorder, boundary), with_kwargs=True)
        else:
            _wrap_prepare_attn(layer.layer_communicator, recorder, boundary)
        attention = getattr(layer, "self_attn", None)
        if isinstance(attention, torch.nn.Module):
            attention.register_forward_pre_hook(_witness(recorder, boundary), with_kwargs=True)
    model.norm.register_forward_hook(after_norm)
    model.register_forward_pre_hook(before_model, with_kwargs=True)
    model.register_forward_hook(after_model, with_kwargs=True)


def _collect(recorder: Recorder, boundary: int) -> Any:
    def hook(module: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
        # on every rank and in every forward alike: what the layer does for a collector may be a collective operation
        return args, dict(kwargs, **{CAPTURE: Collector(recorder, boundary, kwargs.get(CAPTURE))})

    return hook


def _wrap_prepare_attn(communicator: Any, recorder: Recorder, boundary: int) -> None:
    """Layouts A and B: the second value of ``prepare_attn`` is the residual *after* the (fused) all-reduce and add."""
    original = communicator.prepare_attn

    def prepare_attn(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        recorder.boundary(boundary, result[1] if isinstance(result, tuple) and len(result) == 2 else None)
        return result

    communicator.prepare_attn = prepare_attn


def _witness(recorder: Recorder, boundary: int) -> Any:
    def hook(module: Any, args: Any, kwargs: Dict[str, Any]) -> None:
        recorder.attention_input(boundary, kwargs.get("hidden_states"))

    return hook


def describe(model: Any, recorder: Recorder, layout: str, size: int) -> Dict[str, Any]:
    """What attached/rank{r}.json says."""
    settings = recorder.settings
    return {
        "protocol": 1,
        "layout": layout,
        "boundaries": list(settings.boundaries),
        "final": settings.final,
        "rank": recorder.exchange.rank,
        "tp_size": size,
        "pid": os.getpid(),
        "dump_dir": str(settings.dump_dir),
        "hidden_size": recorder.hidden_size,
        "dtype": str(recorder.dtype).replace("torch.", ""),
        "num_layers": len(model.layers),
        "release": recorder.release,
        "helper_sha256": helper_sha256(),
        "server": engine.settings_in_effect(),
    }
