"""Action: take a host's catalogue and keep it on the controller; of a million samples only their number stays in the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).resolve().parent.parent / "module_utils"))

from sglang_hs.fleet import Fleet, key_of


class ActionModule(ActionBase):
    """hs_catalogue: {dir, host, output_dir, state_dir, settings, dataset_sha256, keep}."""

    TRANSFERS_FILES = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module, keep what it says."""
        result = super().run(tmp, task_vars)
        result.update(self._execute_module(module_name="hs_catalogue", task_vars=task_vars))
        text = result.pop("catalogue", None)
        result.pop("invocation", None)
        if text and not result.get("failed"):
            fleet = Fleet(self._task.args["dir"])
            fleet.keep_now(self._task.args["host"], text)
            if boolean(self._task.args.get("keep", False)) and result["identity"].get("dataset_sha256"):
                fleet.keep(key_of(result["identity"]), fleet.present([self._task.args["host"]]))
        return result
