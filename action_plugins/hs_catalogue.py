"""Action: take a host's catalogue and keep it on the controller; of a million samples only their number stays in the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).resolve().parent.parent / "module_utils"))

from sglang_hs.errors import told
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
            try:
                self._keep(text, result["identity"])
            except OSError as error:
                result.update(failed=True, msg=str(told(error)))
        return result

    def _keep(self, text: str, identity: dict[str, Any]) -> None:
        """On the controller; with those of its data set only where that is known, and the host was not refused."""
        given = self._task.args
        fleet = Fleet(given["dir"])
        fleet.keep_now(given["host"], text)
        if boolean(given.get("keep", False)) and identity.get("dataset_sha256"):
            fleet.keep(key_of(identity), fleet.present([given["host"]]))
