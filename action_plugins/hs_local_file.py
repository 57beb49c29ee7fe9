"""Action: write a text to a file on the controller, as whoever started the playbook, without a connection or a process of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).resolve().parent.parent / "module_utils"))

from sglang_hs import fsio


def write(path: Path, text: str, mode: int, check: bool = False) -> bool:
    """Have ``path`` hold ``text``, whole or not at all; whether that is a change. Makes its folder. ``check``: only say. OSError."""
    data = text.encode()
    try:
        same = path.read_bytes() == data and path.stat().st_mode & 0o7777 == mode
    except FileNotFoundError:
        same = False
    if same or check:
        return not same
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fsio.write_text(path.resolve(), text, mode)  # a link stays one: what it leads to is written
    return True


class ActionModule(ActionBase):
    """hs_local_file: {dest, content: a text, or what becomes JSON, mode}."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("dest", "content", "mode"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Write, unless it is there already."""
        result = super().run(tmp, task_vars)
        given = self._task.args
        content, dest = given["content"], str(given["dest"])
        if not isinstance(content, str):
            content = json.dumps(content, indent=4, sort_keys=True) + "\n"
        try:
            place = Path(dest).expanduser()
            changed = write(place, content, int(str(given.get("mode", "0644")), 8), self._task.check_mode)
        except (OSError, RuntimeError) as error:
            result.update(
                failed=True,
                msg=f"{dest} on the controller cannot be written: {getattr(error, 'strerror', None) or error}.\n"
                "Left as it was: what was there before\n"
                "Next: see to the place, or name another one",
            )
        else:
            result.update(changed=changed, dest=str(place))
        return result
