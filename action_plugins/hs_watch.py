"""Action: ask a module again and again until the job on the target is over; say how it is doing; survive a link that breaks.

The job itself is a unit or a session on the target: whatever happens to this watching, it goes on there.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from ansible import constants as C
from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

display = Display()

# Seconds after which a question is answered also without news. Each costs the host a connection and the start of a Python; a log has a
# line every half a minute only, and news come at once either way.
ON_TERMINAL, FOR_LOG = 2.0, 15.0
COLOURS = {"": "", "warn": C.COLOR_WARN, "bad": C.COLOR_ERROR}


class Teller:
    """Says how a host is doing: in place on a terminal (the callback hs_live draws), else a line when the phase changes or when
    ``log_every`` seconds have passed."""

    def __init__(self, host: str, log_every: float) -> None:
        self.host = host
        self.log_every = log_every
        # put there by the callback in the main process, from which this worker was forked; None: no terminal, or no callback
        self.screen = getattr(display, "hs_screen", None)
        self._phase: str | None = None
        self._said_at = 0.0
        self._said = ""

    def say(self, phase: str, line: str, mood: str = "") -> None:
        """mood: "", warn or bad."""
        self._draw(line, COLOURS[mood])
        now = time.monotonic()
        due = now - self._said_at >= self.log_every and line != self._said
        if phase != self._phase or due:
            self._phase, self._said_at, self._said = phase, now, line
            if self.screen is None:
                display.display(f"  {self.host}: {line}")
            elif C.DEFAULT_LOG_PATH:
                display.display(f"  {self.host}: {line}", log_only=True)

    def end(self, line: str = "") -> None:
        """Take the line away; how it ended stays, where a ``line`` says so."""
        self._draw("", "")
        if line:
            display.display(f"  {self.host}: {line}")

    def _draw(self, line: str, colour: str) -> None:
        if self.screen is not None:
            self.screen.send(self.host, line, colour)


class ActionModule(ActionBase):
    """hs_watch: {what, state_dir, run_id, every: seconds between two answers without news, log_every: between two lines in a log,
    patience: without a link}."""

    TRANSFERS_FILES = False
    _VALID_ARGS = frozenset(("what", "state_dir", "run_id", "every", "log_every", "patience"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Watch until the end; the module's last answer, failed with its line where the step failed."""
        result = super().run(tmp, task_vars)
        given = self._task.args
        teller = Teller(
            str((task_vars or {}).get("inventory_hostname", "")),
            float(given.get("log_every", 30)),
        )
        told = ""
        self._heading()
        try:
            result.update(self._watch(teller, task_vars))
            # a failure is told by the result, a restore by the task after it
            told = "" if result.get("failed") or given["what"] == "restore" else str(result.get("line", ""))
        finally:
            teller.end(told)
        return result

    def _heading(self) -> None:
        """Have the callback hs_story, where it is in use, print the task's heading now: what is watched for hours belongs below it."""
        queue = getattr(display, "_final_q", None)
        if queue is not None and hasattr(display, "hs_heading"):
            queue.send_display("hs_heading", self._task._uuid)

    def _watch(self, teller: Teller, task_vars: dict[str, Any] | None) -> dict[str, Any]:
        given = self._task.args
        words = {"what": given["what"], "state_dir": given["state_dir"], "run_id": given.get("run_id", "")}
        patience = float(given.get("patience", 900))
        answered = time.monotonic()
        answered_at = time.time()
        phase = ""
        while True:
            asked, pace = time.monotonic(), self._pace(teller.screen is not None)
            words.update(wait=pace, phase=phase)
            try:
                answer = self._execute_module(module_name="hs_progress", module_args=words, task_vars=task_vars)
            except AnsibleConnectionFailure as error:
                answer = {"unreachable": True, "msg": str(error)}
            if answer.get("unreachable"):
                lost = time.monotonic() - answered
                if lost > patience:
                    return dict(answer)
                since = time.strftime("%H:%M:%S", time.localtime(answered_at))
                teller.say("no link", f"no link since {since} ({lost:.0f} s); the job goes on there", "warn")
                time.sleep(min(pace * 2, 10))
                with contextlib.suppress(AnsibleError):  # a connection that is gone may have nothing to reset
                    self._connection.reset()
                continue
            answered, answered_at = time.monotonic(), time.time()
            if answer.get("failed"):
                return dict(answer)
            if answer["finished"]:
                return dict(answer, failed=True, msg=answer["line"]) if answer["step_failed"] else dict(answer)
            teller.say(answer["phase"], answer["line"], answer.get("mood", ""))
            if answer["phase"] == phase:
                time.sleep(max(0.0, asked + pace - time.monotonic()))  # it waited that long itself, or cannot
            phase = answer["phase"]

    def _pace(self, live: bool) -> float:
        """Seconds that a question may wait for news."""
        given = self._task.args
        return float(given.get("every", ON_TERMINAL if live else min(FOR_LOG, float(given.get("log_every", FOR_LOG)))))
