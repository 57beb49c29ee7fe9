"""Import stand-ins: a release's own source runs although nothing that it imports is installed.

Every module of the packages in ``STANDS_IN_FOR`` can be imported and every name be taken from it. The name is one of

- a file of the release itself, where it is among those kept (``REAL``): run under the same stand-ins,
- what ``supplied`` holds under that name, wherever the release keeps it (they move from release to release),
- else :class:`NotSupplied`: it may stand in an annotation or be a base class, any other use raises.

What raised in a release is written down too, so that one which catches all errors cannot hide it.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence

STANDS_IN_FOR = (
    "sglang",
    "sgl_kernel",
    "transformers",
    "triton",
    "tqdm",
    "aiter",
    "deep_gemm",
    "flashinfer",
    "vllm",
    "einops",
)

# Files of the release that are run, not stood in for; the model is run by execute.py.
REAL = (
    "sglang.srt.operations",
    "sglang.srt.operations_strategy",
    "sglang.srt.layers.aux_hidden_states",
    "sglang.srt.layers.attention.index_topk_share",
    "sglang.srt.layers.communicator",
    "sglang.srt.layers.layer_boundary",
)

uses: List[str] = []  # each use of a name that is not supplied, in words


class Missing(Exception):
    """A name was used that the stand-ins do not supply."""


def _used(name: str, how: str) -> Missing:
    frame = sys._getframe(2)
    place = "{}:{}".format(frame.f_code.co_filename, frame.f_lineno)
    words = "{} is not supplied, and was {} at {}".format(name, how, place)
    if (
        "sglang_hs_capture" not in frame.f_code.co_filename
    ):  # it asks in the places of all releases, and takes no for an answer
        uses.append(words)
    return Missing(words)


class NotSupplied(type):
    """Metaclass of the names that nobody supplies: classes, so that annotations and base classes are fine."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse, unless a class of the release's own inherits from it."""
        if "_not_supplied" in cls.__dict__:
            raise _used(cls.__dict__["_not_supplied"], "called")
        return super().__call__(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") or "_not_supplied" not in cls.__dict__:
            raise AttributeError(name)
        raise _used(cls.__dict__["_not_supplied"], "asked for {}".format(name))

    def __bool__(cls) -> bool:
        if "_not_supplied" in cls.__dict__:
            raise _used(cls.__dict__["_not_supplied"], "tested")
        return True

    def __iter__(cls) -> Any:
        raise _used(cls.__dict__.get("_not_supplied", cls.__name__), "iterated")

    def __instancecheck__(cls, instance: Any) -> bool:
        if "_not_supplied" in cls.__dict__:
            raise _used(cls.__dict__["_not_supplied"], "used in isinstance")
        return super().__instancecheck__(instance)

    def __getitem__(cls, key: Any) -> Any:
        raise _used(cls.__dict__.get("_not_supplied", cls.__name__), "indexed")


class StandIn(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        finder: Finder = self.__spec__.loader  # type: ignore[union-attr, assignment]
        if name.startswith("__") and name not in finder.supplied:
            raise AttributeError(name)
        value = finder.value(self.__name__, name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins, and the files of ``root`` that are real. ``supplied``: name -> value."""

    def __init__(self, root: Path, supplied: Dict[str, Any]) -> None:
        self.root = root
        self.supplied = supplied

    def value(self, module: str, name: str) -> Any:
        """What ``from module import name`` gives."""
        full = "{}.{}".format(module, name)
        if self.real_file(full) is not None:
            return importlib.import_module(full)
        if name in self.supplied:
            return self.supplied[name]
        return NotSupplied(name, (), {"_not_supplied": full, "__module__": module})

    def real_file(self, module: str) -> Optional[Path]:
        """The release's own file for ``module``, where it is to be run."""
        if not any(module == real or module.startswith(real + ".") for real in REAL):
            return None
        path = self.root.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def find_spec(self, fullname: str, path: Optional[Sequence[str]] = None, target: Any = None) -> Any:
        """Every module of the packages stood in for; see importlib."""
        if fullname.split(".")[0] not in STANDS_IN_FOR:
            return None
        real = self.real_file(fullname)
        if real is not None:
            packages = [str(real.parent)] if real.name == "__init__.py" else None
            return importlib.util.spec_from_file_location(fullname, real, submodule_search_locations=packages)
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        """An empty module with every name; see importlib."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs in a stand-in; see importlib."""


def install(root: Path, supplied: Dict[str, Any]) -> None:
    """Put the stand-ins before everything else, for the rest of this process.

    root: folder that holds the release's ``sglang``. supplied: name -> value, wherever it is imported from.
    """
    for name in list(sys.modules):
        if name.split(".")[0] in STANDS_IN_FOR:
            del sys.modules[name]
    sys.meta_path.insert(0, Finder(root, supplied))
