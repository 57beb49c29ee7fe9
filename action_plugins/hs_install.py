"""Action: send the restore program and the engine-side packages to the host as one archive, and have it unpacked there."""

from __future__ import annotations

import hashlib
import io
import tarfile
import tempfile
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

    TRANSFERS_FILES = True
    _VALID_ARGS = frozenset(("state_dir",))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Transfer, then run the module."""
        result = super().run(tmp, task_vars)
        data = archive()
        words = {"state_dir": self._task.args["state_dir"], "checksum": hashlib.sha256(data).hexdigest()}
        if not self._task.check_mode:
            words["src"] = self._connection._shell.join_path(self._connection._shell.tmpdir, "hs.tar")
            with tempfile.NamedTemporaryFile() as local:
                local.write(data)
                local.flush()
                self._transfer_file(local.name, words["src"])
        result.update(self._execute_module(module_name="hs_install", module_args=words, task_vars=task_vars))
        self._remove_tmp_path(self._connection._shell.tmpdir)
        return result
