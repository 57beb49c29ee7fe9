"""Action: have a data set read once, on the host or here, and keep its lengths on the controller."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).resolve().parent.parent / "module_utils"))

from sglang_hs import fleet
from sglang_hs.errors import HsError, told


class ActionModule(ActionBase):
    """hs_index: {dir, settings, source}."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Read it where it lies, unless it is known."""
        result = super().run(tmp, task_vars)
        given = self._task.args
        folder = Path(given["dir"])
        known = sorted(path.name for path in folder.glob("index-*.txt"))
        if given.get("source"):
            try:
                result.update(fleet.indexed(str(given["source"]), given["settings"], known), changed=False)
            except HsError as error:
                result.update(failed=True, msg=str(error))
            except OSError as error:
                result.update(failed=True, msg=str(told(error)))
        else:
            words = {**given, "known": known}
            result.update(self._execute_module(module_name="hs_index", module_args=words, task_vars=task_vars))
        text = result.pop("index", None)
        result.pop("invocation", None)
        if text and not result.get("failed"):
            try:
                fleet.write(folder / result["name"], text)
            except OSError as error:
                result.update(failed=True, msg=str(told(error)))
        return result
