"""Import-only stand-in for triton: decorators pass through, kernels cannot launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _import_stub

from .runtime.jit import JITFunction


def jit(fn: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """Wrap a kernel, with or without options."""
    return JITFunction(fn) if callable(fn) else JITFunction


def autotune(*_args: Any, **_kwargs: Any) -> Callable[[Any], Any]:
    """Leave the kernel as it is."""
    return lambda fn: fn


heuristics = autotune


class Config:
    """One tuning choice of a kernel."""

    def __init__(self, kwargs: dict[str, Any] | None = None, **_options: Any) -> None:
        self.kwargs = kwargs


def cdiv(x: int, y: int) -> int:
    """Divide, rounded up."""
    return (x + y - 1) // y


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1


_import_stub.install(__name__, "3.5.1")
