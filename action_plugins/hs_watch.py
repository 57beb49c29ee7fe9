"""Action: ask a module again and again until the job on the target is over; say how it is doing; survive a link that breaks.

The job itself is a unit or a session on the target: whatever happens to this watching, it goes on there.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()


class ActionModule(ActionBase):
    """hs_watch: {what, state_dir, run_id, every: seconds between two questions, patience: seconds without a link}."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("what", "state_dir", "run_id", "every", "patience"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Watch until the end; the module's last answer, failed with its line where the step failed."""
        result = super().run(tmp, task_vars)
        host = str((task_vars or {}).get("inventory_hostname", ""))
        words = {
            "what": self._task.args["what"],
            "state_dir": self._task.args["state_dir"],
            "run_id": self._task.args.get("run_id", ""),
        }
        every = float(self._task.args.get("every", 1))
        patience = float(self._task.args.get("patience", 900))
        silent_since: float | None = None
        said, said_at = "", 0.0
        while True:
            try:
                answer = self._execute_module(module_name="hs_progress", module_args=words, task_vars=task_vars)
            except AnsibleConnectionFailure as error:
                answer = {"unreachable": True, "msg": str(error)}
            if answer.get("unreachable"):
                silent_since = silent_since or time.monotonic()
                lost = time.monotonic() - silent_since
                if lost > patience:
                    result.update(answer)
                    return result
                self._say(host, f"no link for {lost:.0f} s; the job goes on there")
                time.sleep(min(every * 2, 10))
                with contextlib.suppress(AnsibleError):  # a connection that is gone may have nothing to reset
                    self._connection.reset()
                continue
            silent_since = None
            if answer.get("failed"):
                result.update(answer)
                return result
            if answer["finished"]:
                result.update(answer)
                if answer["step_failed"]:
                    result.update(failed=True, msg=answer["line"])
                return result
            # a changed line at once, but no wall of them in a log
            if answer["line"] != said and time.monotonic() - said_at >= every:
                said, said_at = answer["line"], time.monotonic()
                self._say(host, said)
            time.sleep(every)

    @staticmethod
    def _say(host: str, line: str) -> None:
        display.display(f"  {host}: {line}")
