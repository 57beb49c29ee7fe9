"""Callback: ends ansible-playbook with the status that hs_fail asked for, where no host failed otherwise."""

from __future__ import annotations

from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: hs_exit_status
type: aggregate
short_description: The exit status that hs_fail asks for
description:
  - A run that was cut by its window is no failure of anything, and a script should tell it from one.
  - Unreachable hosts and every other failure keep Ansible's own status.
requirements: [enabled in ansible.cfg]
"""


class CallbackModule(CallbackBase):
    """Counts what each failed host asked for."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "hs_exit_status"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self._asked: dict[str, int] = {}

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """Keep a host's last failure: a rescued one comes before it."""
        if not ignore_errors:
            self._asked[result._host.get_name()] = int(result._result.get("hs_exit_status", 0))

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """After the recap: leave with the status, if all that failed ask for the same one."""
        failed = [host for host, count in stats.failures.items() if count]
        asked = {self._asked.get(host, 0) for host in failed}
        if failed and not stats.dark and len(asked) == 1 and (status := asked.pop()):
            raise SystemExit(status)
