"""What the tests of source_edit share: a file shaped like an engine's model, edits for it, a place to edit it in."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from sglang_hs import source_edit

MODEL = b'''# -*- coding: utf-8 -*-
"""A model."""
from __future__ import annotations

import os


class Layer:
    def __init__(self, number: int) -> None:
        self.number = number


class Model:
    """It has layers."""

    def __init__(self, layers: int, path: str = os.sep) -> None:
        super().__init__()
        self.layers = [
            Layer(number)
            for number in range(layers)
        ]
        self.norm = Layer(-1)  # the last one

    def forward(self, states):
        """All layers."""
        seen = []
        for i in range(len(self.layers)):
            with open(os.devnull):
                layer = self.layers[i]
                states, residual = states + layer.number, None
        if not seen:
            return states
        return states, seen
'''

END_OF_INIT = {"class": "Model", "function": "__init__", "position": "end"}
LINES = ["import os as _os", 'if _os.environ.get("NOT_SET"):', "    self.hooked = True"]


def variant(
    anchor: Optional[Dict[str, Any]] = None, lines: Any = None, name: str = "one", **more: Any
) -> Dict[str, Any]:
    """One variant with one edit."""
    edit = {"anchor": anchor or END_OF_INIT, "lines": LINES if lines is None else lines}
    return {"name": name, "edits": [edit], **more}


class Place:
    """A file in a package's folder, and a backup folder elsewhere."""

    def __init__(self, root: Path, content: bytes = MODEL, name: str = "model.py") -> None:
        self.root = root
        self.file = root / "lib" / name
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(content)
        os.utime(self.file, ns=(10**18, 10**18))  # as a package's files are: of long ago
        self.backup = root / "backup"

    def plan(self, variants: Optional[List[Dict[str, Any]]] = None, **options: Any) -> source_edit.Plan:
        return source_edit.plan(str(self.file), variants or [variant()], str(self.backup), **options)

    def present(self, variants: Optional[List[Dict[str, Any]]] = None, **options: Any) -> Dict[str, Any]:
        return source_edit.apply(self.plan(variants, **options))

    def undo(self) -> Dict[str, Any]:
        return source_edit.undo(str(self.file), str(self.backup))

    def inspect(self) -> Dict[str, Any]:
        return source_edit.inspect(str(self.file), str(self.backup))

    def read(self) -> bytes:
        return self.file.read_bytes()

    def beside(self) -> List[str]:
        """What lies in the file's folder apart from the file."""
        return sorted(name for name in os.listdir(self.file.parent) if name != self.file.name)

    def kept(self) -> List[str]:
        """What lies in the backup folder."""
        return sorted(os.listdir(self.backup)) if self.backup.exists() else []


def in_child(work: Callable[[], Any]) -> str:
    """Run ``work`` in a fork; its result as text, "refused <reason>", "killed" or the traceback."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except source_edit.EditRefused as error:
            answer = "refused " + error.reason
        except BaseException:
            answer = traceback.format_exc()
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as handle:
        answer = handle.read().decode()
    _pid, status = os.waitpid(child, 0)
    return "killed" if os.WIFSIGNALED(status) else answer


def as_nobody(work: Callable[[], Any]) -> str:
    """``in_child`` as the user nobody."""

    def dropped() -> Any:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        return work()

    return in_child(dropped)
