"""The project's edit, done and undone by the same functions that the module source_patch and the restore call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Dict, List

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "module_utils"))

from sglang_hs import source_edit  # noqa: E402 - it lies beside, not in a package
from sglang_hs.source_edit import EditRefused  # noqa: E402

__all__ = ["EditRefused", "Edited", "variants"]


def variants() -> List[Dict[str, Any]]:
    """The edit as the role backup_and_patch has it."""
    data = yaml.safe_load((ROOT / "roles/backup_and_patch/vars/main.yml").read_text(encoding="utf-8"))
    found: List[Dict[str, Any]] = data["backup_and_patch_variants"]
    return found


class Edited:
    """A source, edited in a folder of its own.

    folder: an empty one, for the file and the backup. Raises EditRefused, with nothing written.
    """

    def __init__(self, source: bytes, folder: Path) -> None:
        self.path = folder / "site" / "deepseek_v2.py"
        self.path.parent.mkdir()
        self.path.write_bytes(source)
        self.source = source
        self.before = self.path.stat().st_mtime_ns
        self.backup = str(folder / "backup")
        self.plan = source_edit.plan(str(self.path), variants(), self.backup)
        source_edit.apply(self.plan)
        compile(self.path.read_bytes(), str(self.path), "exec", dont_inherit=True)

    @property
    def variant(self) -> Dict[str, Any]:
        """The variant that fits."""
        return next(variant for variant in variants() if variant["name"] == self.plan.variant)

    def again(self) -> bool:
        """Whether a second apply changes nothing."""
        patched = self.path.read_bytes()
        done = source_edit.apply(source_edit.plan(str(self.path), variants(), self.backup))
        return not done["changed"] and self.path.read_bytes() == patched

    def undo(self) -> bool:
        """Take the edit out; whether bytes and modification time are the original's."""
        source_edit.undo(str(self.path), self.backup)
        return self.path.read_bytes() == self.source and self.path.stat().st_mtime_ns == self.before
