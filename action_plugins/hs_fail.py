"""Action: fail with a message, and with an exit status of the whole ``ansible-playbook`` that scripts can tell apart."""

from __future__ import annotations

from typing import Any

from ansible.plugins.action import ActionBase


class ActionModule(ActionBase):
    """hs_fail: {msg, exit_status: 0 leaves Ansible's own}."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(("msg", "exit_status"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Fail."""
        result = super().run(tmp, task_vars)
        given = self._task.args
        result.update(failed=True, msg=given["msg"], hs_exit_status=int(given.get("exit_status") or 0))
        return result
