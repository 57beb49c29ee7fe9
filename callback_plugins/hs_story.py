"""Callback: Ansible's own output, with a failure told once, as the message that it is.

Ansible tells a failed task twice, with the place in the playbook and everything that the module returned; of a role's wrong argument it
prints the whole specification. The messages of this project have three parts - what happened, Left as it was, Next - and are all that
an operator needs; C(-v) shows the rest as ever. What this project did not expect (a module that crashed, an undefined variable) is shown
in full.
"""

from __future__ import annotations

import textwrap
from typing import Any

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

DOCUMENTATION = """
name: hs_story
type: stdout
short_description: Ansible's output, with failures as messages
description:
  - As ansible.builtin.default, but a task that failed with a message of its own shows the message, and a wrong role argument what is wrong;
    right ones are not mentioned.
  - Verbosity 1 and more shows everything.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
requirements: [set as stdout_callback in ansible.cfg]
"""

# Actions whose msg is written for a person.
TELLING = ("hs_", "source_patch", "ansible.builtin.assert", "assert", "ansible.builtin.fail", "fail")
SPEC = ("ansible.builtin.validate_argument_spec", "validate_argument_spec")


def message(action: str, result: dict[str, Any]) -> str | None:
    """What to tell of a failed result; None where all of it is to be shown."""
    if action in SPEC and result.get("argument_errors"):
        return _wrong_arguments(result)
    msg = str(result.get("msg") or "").strip()
    # a module that crashed, or a task that did not come as far as its module
    unexpected = {"module_stderr", "module_stdout"} & set(result) or msg.startswith("Task failed")
    return None if not msg or unexpected or not action.startswith(TELLING) else msg


def no_link(result: dict[str, Any]) -> str:
    """What to tell of a host that cannot be reached."""
    return (
        f"{str(result.get('msg', 'no connection')).removeprefix('Task failed: ')}\n"
        "Left as it was: what runs on the host goes on there, and its guard needs no link\n"
        "Next: see that ssh reaches the host as it stands in the inventory, then start the same playbook again"
    )


def _wrong_arguments(result: dict[str, Any]) -> str:
    role = str((result.get("validate_args_context") or {}).get("name", ""))
    said = [str(error) for error in result["argument_errors"]]
    if role == "preflight":
        said.append("Left as it was: everything; nothing was asked of the host yet")
    said.append(
        f"Next: correct it where it is set (the inventory, or -e); roles/{role}/defaults/main.yml says what it takes"
    )
    return "\n".join(said)


def _data(result: Any) -> dict[str, Any]:
    """What a task returned; until ansible-core 2.18 it had another name."""
    return dict(result.result if hasattr(result, "result") else result._result)


def _task(result: Any) -> Any:
    """The task of a result; likewise."""
    return result.task if hasattr(result, "task") else result._task


class CallbackModule(Default):
    """The default callback, but for failures."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "hs_story"

    def __init__(self) -> None:
        super().__init__()
        self._started: dict[str, Any] = {}
        # called by hs_watch from its worker, through the queue that brings all messages
        self._display.hs_heading = self._heading

    def v2_playbook_on_task_start(self, task: Any, is_conditional: bool) -> None:
        """As ever; where skipped tasks are not shown, the heading waits for the first result."""
        super().v2_playbook_on_task_start(task, is_conditional)
        self._started = {task._uuid: task}

    def _heading(self, uuid: str) -> None:
        """The heading of a task that is at work and has something to say before its result."""
        task = self._started.get(uuid)
        if task is not None and self._last_task_banner != uuid:
            self._print_task_banner(task)

    def v2_runner_on_ok(self, result: Any) -> None:
        """A task that went well. That a role's arguments are of their types goes without saying."""
        if self._display.verbosity > 0 or _task(result).action not in SPEC:
            super().v2_runner_on_ok(result)

    def v2_runner_on_failed(self, result: Any, ignore_errors: bool = False) -> None:
        """A failed task."""
        told = self._told(result)
        if told is None:
            super().v2_runner_on_failed(result, ignore_errors)
            return
        self._tell(result, f"fatal: [{self.host_label(result)}]: FAILED! =>", told)
        if ignore_errors:
            self._display.display("...ignoring", color=C.COLOR_SKIP)

    def v2_runner_item_on_failed(self, result: Any) -> None:
        """A failed item of a loop."""
        told = self._told(result)
        if told is None:
            super().v2_runner_item_on_failed(result)
            return
        item = self._get_item_label(_data(result))
        self._tell(result, f"failed: [{self.host_label(result)}] (item={item}) =>", told)

    def v2_runner_on_unreachable(self, result: Any) -> None:
        """A host that cannot be reached."""
        if self._display.verbosity > 0:
            super().v2_runner_on_unreachable(result)
            return
        head = f"fatal: [{self.host_label(result)}]: UNREACHABLE! =>"
        self._tell(result, head, no_link(_data(result)), C.COLOR_UNREACHABLE)
        if _task(result).ignore_unreachable:
            self._display.display("...ignoring", color=C.COLOR_SKIP)

    def _told(self, result: Any) -> str | None:
        if self._display.verbosity > 0 or "results" in _data(result):
            return None
        return message(str(_task(result).action), _data(result))

    def _tell(self, result: Any, head: str, told: str, colour: str = C.COLOR_ERROR) -> None:
        if self._last_task_banner != _task(result)._uuid:
            self._print_task_banner(_task(result))
        self._handle_warnings(_data(result))
        text = head + "\n" + textwrap.indent(told, "    ")
        self._display.display(text, color=colour, stderr=self.get_option("display_failed_stderr"))
