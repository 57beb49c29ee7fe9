"""Import-only stand-ins: every name of such a package resolves, using one raises.

The engine imports GPU and media packages at start-up that a run on a CPU never calls. A stand-in
lets the import pass; a call that would need the real package fails with its name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, NoReturn


class _StubMeta(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(f"{cls.__qualname__}.{name}")

    def __call__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{cls.__qualname__} is an import-only stand-in in this environment")


def _stub(qualname: str) -> type:
    return _StubMeta(qualname.rsplit(".", 1)[-1], (), {"__qualname__": qualname})


def _attach(module: types.ModuleType) -> None:
    def resolve(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(f"{module.__name__}.{name}")

    module.__getattr__ = resolve  # type: ignore[method-assign]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes up the submodules that the stand-in's folder does not hold."""

    def __init__(self, root: str) -> None:
        self.prefix = f"{root}."

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.startswith(self.prefix):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []
        _attach(module)


def install(name: str, version: str) -> None:
    """Turn the imported module `name` into a stand-in that reports `version`."""
    module = sys.modules[name]
    module.__version__ = version  # type: ignore[attr-defined]
    _attach(module)
    sys.meta_path.append(_Finder(name))
