#!/usr/bin/python
"""Ansible module: insert lines into somebody else's Python source file, and undo it to the byte."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Optional

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.sglang_hs import source_edit
from ansible.module_utils.sglang_hs.errors import HsError, told

DOCUMENTATION = r"""
---
module: source_patch
short_description: Insert lines into somebody else's Python source file, and undo it to the byte
description:
  - Inserts blocks of lines into a Python source file of an installed package, at places named in the file's I(syntax
    tree) (a class, a function, a statement), not by line number or regular expression.
  - Several I(variants) can be given, one for each layout that the file has in different releases. The one whose
    anchors all match exactly once is used. A file that fits none is refused, with the anchors that did not match, and
    stays as it is.
  - Only whole lines are inserted, each block between two comment lines. Encoding, byte order mark, line ends,
    indentation, a missing final newline, owner, mode, ACL, SELinux label and extended attributes stay as they are.
  - Before anything is written the edited file is compiled, and its syntax tree is shown to be the original one plus
    the inserted statements.
  - The markers carry a hash of the whole original file. So the module proves what it undoes, and tells its own edit
    from a foreign one. A foreign edit is refused, with the place.
  - The original is kept in O(backup_dir), which must not lie in a Python package. O(state=absent) restores the
    original bytes and the original modification time. A file that was replaced since, for instance by an upgrade of
    the package, is left alone.
  - Compiled copies (C(__pycache__)) of the file are removed whenever it changes.
  - The syntax is read by the Python that runs the module, so run it with the Python of the package
    (C(ansible_python_interpreter)) where the host's own is older.
options:
  path:
    description:
      - Absolute path of the Python source file. A symbolic link is followed, and stays one.
    type: path
    required: true
  state:
    description:
      - Whether the inserted blocks shall be there.
    type: str
    choices: [present, absent]
    default: present
  backup_dir:
    description:
      - Absolute path of the folder that keeps the original and the record of the edit. Created with mode 0700 if it
        does not exist.
      - It is refused if it lies in a Python package or if other users can write to it.
    type: path
    required: true
  variants:
    description:
      - The edits, one entry for each layout of the file. Required with O(state=present), not needed with
        O(state=absent).
      - If several fit, they must come to the same insertions.
    type: list
    elements: dict
    suboptions:
      name:
        description: A name for messages and results.
        type: str
        required: true
      edits:
        description: The blocks to insert.
        type: list
        elements: dict
        required: true
        suboptions:
          anchor:
            description:
              - Where the block goes. With neither class, function nor statement, V(start) and V(end) mean those of
                the module.
            type: dict
            required: true
            suboptions:
              class:
                description: Name of a class, dotted for a class within a class. It must stand there once.
                type: str
              function:
                description: Name of a function or method, dotted for one within a function. It must stand there once.
                type: str
              statement:
                description:
                  - A Python statement in that scope (in blocks of any depth, not in inner functions or classes) that
                    must match exactly once. It is compared as syntax, so line breaks and quotes do not matter.
                  - In it, V(...) stands for any expression (but not for what is assigned to) or, in a list of arguments
                    or elements, for any number of them.
                  - Of a statement with a body only the head is written, for instance V(for i in range(...\):).
                type: str
              position:
                description:
                  - V(before) or V(after) the statement (or class, or function), or at the V(start) or V(end) of its
                    body. V(start) is after a docstring.
                type: str
                choices: [before, after, start, end]
                required: true
              early_return:
                description:
                  - A block at the end of a function that returns earlier is refused, because it would not always run.
                    Set this where that is meant.
                type: bool
                default: false
          lines:
            description:
              - The lines to insert, as a list or as one text, indented by 4 spaces as from the left margin. They get
                the indentation of the place. No text over several lines may be in them.
              - An empty line stays empty.
            type: raw
            required: true
      requires:
        description:
          - Further things that must be there for this variant, each with class, function and statement as in an
            anchor (at least once in its scope).
        type: list
        elements: dict
        default: []
      forbids:
        description:
          - Things that must not be there for this variant, written as in O(variants[].requires).
        type: list
        elements: dict
        default: []
  marker:
    description:
      - Text in the comment lines around each block, for the reader of the file. 3 to 80 ASCII characters.
      - One file can carry one edit. A second one under another marker is refused.
    type: str
    default: source_patch
  journal:
    description:
      - The open run that the edit is a step of. Its beginning and its end are then recorded in the run's journal on the host, in this same call.
      - Refused, with the file as it was, where that run may not go forward any more.
    type: dict
    suboptions:
      state_dir: {description: Folder of the journal., type: path, required: true}
      run_id: {description: The run., type: str, required: true}
      step: {description: Name of the step., type: str, required: true}
attributes:
  check_mode:
    description: Predicts everything, also a refusal, and writes nothing.
    support: full
  diff_mode:
    description: Shows the whole difference.
    support: full
notes:
  - A hard link is not kept (some installers link a package's files to their cache) - the edited file becomes a file
    of its own and the other names keep the original. The result says so in RV(notes).
  - A file that is a mount point of its own or immutable is refused, for it cannot be replaced in one step.
author:
  - The sglang-hidden-states project
"""

EXAMPLES = r"""
- name: Let a web framework report every start of a worker, in two releases that differ
  source_patch:
    path: /opt/site/lib/python3.11/site-packages/framework/worker.py
    backup_dir: /var/lib/worker-report/backup
    marker: worker-report
    variants:
      # Up to 3.x a worker is started by its constructor.
      - name: "3"
        edits:
          - anchor: {class: Worker, function: __init__, position: end}
            lines:
              - import worker_report
              - worker_report.started(self)
      # From 4.0 on there is a method for it, and inside it one loop.
      - name: "4"
        requires:
          - {class: Worker, function: stop}
        edits:
          - anchor:
              class: Worker
              function: run
              statement: "while not self.stopping(...):"
              position: before
            lines: |
              import worker_report
              worker_report.started(self)
  register: worker_report_edit

- name: Add a line after an import, whatever the names imported from there are
  source_patch:
    path: /usr/lib/python3/dist-packages/tool/__main__.py
    backup_dir: /var/lib/tool-edit
    variants:
      - name: any
        edits:
          - anchor: {statement: "import argparse", position: after}
            lines: ["import tool_locale  # sets the locale when imported"]

- name: Show what the edit would be and whether this release is known, without changing anything
  source_patch:
    path: /opt/site/lib/python3.11/site-packages/framework/worker.py
    backup_dir: /var/lib/worker-report/backup
    marker: worker-report
    variants: "{{ worker_report_variants }}"
  check_mode: true
  diff: true

- name: Give the original bytes back (the edits need not be known for that)
  source_patch:
    path: /opt/site/lib/python3.11/site-packages/framework/worker.py
    backup_dir: /var/lib/worker-report/backup
    state: absent
"""

RETURN = r"""
path:
  description: The path as given.
  returned: always
  type: str
real_path:
  description: The file that it leads to, links followed. This one is edited.
  returned: success
  type: str
state_before:
  description:
    - V(pristine), nothing of ours in it.
    - V(replaced), the same, but the backup is of another file (the package was upgraded since). The backup is set
      aside.
    - V(patched), our blocks and nothing else changed.
    - V(patched_other_version), our blocks with other lines than asked for, nothing else changed. They are exchanged.
    - V(missing), with O(state=absent) only. There is nothing to undo.
  returned: success
  type: str
  sample: pristine
state_after:
  description: The state after the task, in check mode the one that it would come to.
  returned: success
  type: str
  sample: patched
variant:
  description: Name of the variant that fits. Null with O(state=absent).
  returned: success
  type: str
  sample: "4"
patch_version:
  description: A short hash of the edits and the marker. It stands in the markers too.
  returned: success
  type: str
  sample: 92e63dc9fc65
insertions:
  description: Each block, by its first line (the marker) in the edited file.
  returned: success
  type: list
  elements: dict
  contains:
    line:
      description: Number of the block's first line in the edited file, counted from 1.
      type: int
    lines:
      description: The lines of the block as they stand in the file, markers included.
      type: list
      elements: str
    where:
      description: The place in words.
      type: str
  sample:
    - line: 212
      lines:
        - "        # BEGIN worker-report [source_patch 92e63dc9fc65 block 1/1 of 0f343b0931126a20]"
        - "        import worker_report"
        - "        worker_report.started(self)"
        - "        # END worker-report [source_patch 92e63dc9fc65 block 1/1 of 0f343b0931126a20]"
      where: "end of Worker.__init__, after line 211"
sha256_before:
  description: Hash of the whole file as it was found.
  returned: success
  type: str
sha256_after:
  description: Hash of the whole file after the task.
  returned: success
  type: str
sha256_pristine:
  description: Hash of the original.
  returned: success
  type: str
backup:
  description:
    - Path of the kept original, in check mode the one that it would get. Null once O(state=absent) has removed it.
  returned: success
  type: str
notes:
  description: What is worth knowing and no failure, for instance a hard link that was not kept.
  returned: success
  type: list
  elements: str
reason:
  description: Why it was refused, in one word for a condition (C(failed_when), C(rescue)). RV(msg) says it for people.
  returned: failure
  type: str
  sample: no_variant
msg:
  description: What was done, or what happened, what was left as it was and what to do next.
  returned: always
  type: str
"""

_CONDITION: Dict[str, Any] = {
    "class": {"type": "str"},
    "function": {"type": "str"},
    "statement": {"type": "str"},
}
_ANCHOR: Dict[str, Any] = {
    **_CONDITION,
    "position": {"type": "str", "required": True, "choices": ["before", "after", "start", "end"]},
    "early_return": {"type": "bool", "default": False},
}
_EDIT: Dict[str, Any] = {
    "anchor": {"type": "dict", "required": True, "options": _ANCHOR},
    "lines": {"type": "raw", "required": True},
}
_VARIANT: Dict[str, Any] = {
    "name": {"type": "str", "required": True},
    "edits": {"type": "list", "elements": "dict", "required": True, "options": _EDIT},
    "requires": {"type": "list", "elements": "dict", "default": [], "options": _CONDITION},
    "forbids": {"type": "list", "elements": "dict", "default": [], "options": _CONDITION},
}
ARGUMENTS: Dict[str, Any] = {
    "path": {"type": "path", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "backup_dir": {"type": "path", "required": True},
    "variants": {"type": "list", "elements": "dict", "options": _VARIANT},
    "marker": {"type": "str", "default": source_edit.DEFAULT_MARKER},
    "journal": {
        "type": "dict",
        "options": {
            "state_dir": {"type": "path", "required": True},
            "run_id": {"type": "str", "required": True},
            "step": {"type": "str", "required": True},
        },
    },
}


def _for_people(data: bytes, encoding: str) -> str:
    """The bytes of a source as a text that any JSON can carry, whatever they are."""
    try:
        return data.decode(encoding)
    except (UnicodeError, LookupError):
        return data.decode("ascii", "backslashreplace")


@contextlib.contextmanager
def _step(journal: Optional[Dict[str, str]]) -> Iterator[Dict[str, str]]:
    """Record the edit in a run's journal before and after, where it belongs to one; yields what takes the ``detail`` of its end. Raises HsError."""
    end: Dict[str, str] = {"detail": ""}
    if journal is None:
        yield end
        return
    # not at every start: a module compiles what it imports
    from ansible.module_utils.sglang_hs import turns

    def note(state: str) -> None:
        turns.note(journal["state_dir"], journal["run_id"], journal["step"], state, end["detail"], 0.0)

    try:
        note("begun")
    except OSError as error:
        raise told(error) from error
    yield end
    try:
        note("done")
    except OSError as error:
        what = told(error)
        raise HsError(
            what.what, "the file, which is edited by now and whole; playbooks/restore.yml undoes it", what.next
        ) from error


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec=ARGUMENTS, required_if=[("state", "present", ("variants",))], supports_check_mode=True
    )
    given = module.params
    try:
        with _step(None if module.check_mode else given["journal"]) as end:
            todo = source_edit.plan(
                given["path"], given["variants"], given["backup_dir"], state=given["state"], marker=given["marker"]
            )
            before, after = todo.before, todo.after
            result = todo.to_dict() if module.check_mode else source_edit.apply(todo)
            end["detail"] = result["msg"]
    except source_edit.EditRefused as error:
        module.fail_json(msg=str(error), reason=error.reason, path=given["path"])
    except HsError as error:  # the journal's
        module.fail_json(msg=str(error), reason="journal", path=given["path"])
    except Exception as error:  # a defect of ours: still a message, and the file is whole in any case
        module.fail_json(
            msg="source_patch failed in a way that it should not, at {}: {}: {}. The file is whole: it is only ever "
            "replaced in one step. Please report this.".format(given["path"], type(error).__name__, error),
            reason="defect",
            path=given["path"],
        )
    if module._diff:
        result["diff"] = {
            "before": _for_people(before, todo.encoding),
            "after": _for_people(after, todo.encoding),
            "before_header": "{} ({})".format(todo.real_path, todo.state_before),
            "after_header": "{} ({})".format(todo.real_path, todo.state_after),
        }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
