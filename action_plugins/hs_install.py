"""Action: send the restore program and the engine-side packages to the host within the module's own call, and have them unpacked there.

Within it: a file would be four more commands over the link (a folder for it, itself, its mode, its end).
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import zlib
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = (
    "module_utils/sglang_hs",
    "files/engine/sglang_hs_capture",
    "files/engine/sglang_hs_models",
    "files/engine/sglang_hs_client",
)


def archive() -> bytes:
    """All packages in one tar, the same bytes for the same files."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for package in PACKAGES:
            folder = REPOSITORY / package
            for path in sorted(folder.rglob("*.py")):
                entry = tarfile.TarInfo(str(Path(folder.name) / path.relative_to(folder)))
                data = path.read_bytes()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


class ActionModule(ActionBase):
    """hs_install: {state_dir}."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("state_dir",))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Pack, then run the module."""
        result = super().run(tmp, task_vars)
        data = archive()
        words = {"state_dir": self._task.args["state_dir"], "checksum": hashlib.sha256(data).hexdigest()}
        if not self._task.check_mode:
            words["archive"] = base64.b64encode(zlib.compress(data)).decode()
        result.update(self._execute_module(module_name="hs_install", module_args=words, task_vars=task_vars))
        return result
