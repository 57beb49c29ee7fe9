"""Import-only stand-in for triton.runtime.jit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import _import_stub


class JITFunction:
    """What `triton.jit` returns: some releases check for this class."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        functools.update_wrapper(self, fn)

    def __getitem__(self, grid: Any) -> NoReturn:
        raise NotImplementedError(f"the triton kernel {self.__name__} cannot run in this environment")


_import_stub.install(__name__, "3.5.1")
