"""Callback: when each task began, a JSON line each, in the file that $BENCH_TASKS names."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: bench_tasks
type: aggregate
short_description: When each task began
description:
  - For the measurements in bench; a line has C(at), seconds of the unix clock, and C(task).
requirements: [enabled by C(ANSIBLE_CALLBACKS_ENABLED), a file in C(BENCH_TASKS)]
"""


class CallbackModule(CallbackBase):
    """The lines."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "bench_tasks"
    CALLBACK_NEEDS_ENABLED = True

    def _line(self, task: str) -> None:
        with open(os.environ["BENCH_TASKS"], "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"at": time.time(), "task": task}) + "\n")

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """A task begins (of an include and a role's validation too)."""
        self._line(task.get_name())

    def v2_playbook_on_stats(self, stats: Any) -> None:
        """All are through."""
        self._line("")
