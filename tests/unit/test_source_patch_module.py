"""The module source_patch, run for real by ansible on this machine, with a home of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
from sglang_hs.journal import Journal, Paths
from source_edit_helpers import MODEL, Place, variant

REPOSITORY = Path(__file__).resolve().parents[2]
BESIDE = Path(sys.executable).parent
ANSIBLE = str(BESIDE / "ansible") if (BESIDE / "ansible").exists() else shutil.which("ansible")
pytestmark = pytest.mark.skipif(ANSIBLE is None, reason="ansible is not installed")


class Module:
    """Runs the module on one place."""

    def __init__(self, place: Place, home: Path) -> None:
        self.place = place
        self.home = home
        (home / "ansible.cfg").touch()
        self.environment = {
            **os.environ,
            "HOME": str(home),
            "ANSIBLE_HOME": str(home / "ansible"),
            "ANSIBLE_LOCAL_TEMP": str(home / "local"),
            "ANSIBLE_REMOTE_TEMP": str(home / "remote"),
            "ANSIBLE_CONFIG": str(home / "ansible.cfg"),
            "ANSIBLE_LIBRARY": str(REPOSITORY / "library"),
            "ANSIBLE_MODULE_UTILS": str(REPOSITORY / "module_utils"),
        }

    def run(self, several: List[Dict[str, Any]], *options: str) -> List[Dict[str, Any]]:
        """One playbook with a task for each set of arguments; the results, each with all that was printed.

        ``check`` among the arguments runs that task in check mode.
        """
        tasks: List[Dict[str, Any]] = []
        for arguments in several:
            given = {"path": str(self.place.file), "backup_dir": str(self.place.backup), **arguments}
            check = given.pop("check", False)
            if given.get("state") != "absent":
                given.setdefault("variants", [variant()])
            name = "result{}".format(len(tasks))
            task = {"source_patch": given, "register": name, "ignore_errors": True}
            tasks.append({**task, "check_mode": True} if check else task)
        answers = "{{ [" + ", ".join(str(task["register"]) for task in tasks) + "] | to_json }}"
        report = {"content": answers, "dest": str(self.home / "result.json")}
        tasks.append({"ansible.builtin.copy": report, "check_mode": False, "diff": False})
        variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        playbook = self.home / "playbook.json"
        playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "vars": variables, "tasks": tasks}]))
        argv = [str(Path(str(ANSIBLE)).with_name("ansible-playbook")), "-i", "localhost,", *options, str(playbook)]
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
        assert "Traceback" not in printed
        return [{**result, "all": printed} for result in json.loads((self.home / "result.json").read_text())]


@pytest.fixture
def module(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    return Module(Place(tmp_path), home)


def test_check_mode_predicts_what_the_run_then_does(module):
    predicted, done, again, undoing, undone, nothing = module.run(
        [
            {"check": True},
            {},
            {},
            {"check": True, "state": "absent"},
            {"state": "absent"},
            {"state": "absent"},
        ]
    )
    for key in ("changed", "state_before", "state_after", "variant", "patch_version", "insertions", "backup"):
        assert predicted[key] == done[key], key
        assert undoing[key] == undone[key], key
    assert predicted["sha256_before"] == done["sha256_before"]
    assert predicted["sha256_after"] == done["sha256_after"] == again["sha256_before"] == undoing["sha256_before"]
    assert [result["changed"] for result in (done, again, undone, nothing)] == [True, False, True, False]
    assert again["state_before"] == "patched"
    assert undone["state_after"] == "pristine"
    assert module.place.read() == MODEL
    assert module.place.kept() == []


def test_a_file_that_is_not_utf_8_can_be_shown_and_edited_with_diff(module):  # 30
    source = b"# coding: latin-1\n# \xe9\xff\nclass Model:\n    def __init__(self):\n        self.a = '\xfc'\n"
    module.place.file.write_bytes(source)
    (result,) = module.run([{}], "--diff", "--check")
    assert result["changed"]
    assert "+        # BEGIN source_patch" in result["all"]
    results = module.run([{}, {}, {"state": "absent"}], "--diff")
    assert [result["changed"] for result in results] == [True, False, True]
    assert "-        # BEGIN source_patch" in results[0]["all"]
    assert module.place.read() == source


def test_check_mode_with_a_missing_file_fails_as_the_run_would(module):  # 27
    module.place.file.unlink()
    predicted, done, undone = module.run([{"check": True}, {}, {"state": "absent"}])
    assert predicted["reason"] == done["reason"] == "missing"
    assert predicted["msg"] == done["msg"]
    assert (undone["failed"], undone["changed"]) == (False, False)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"path": "/"}, "is a folder"),
    ({"path": "relative/model.py"}, "not an absolute path"),
    ({"backup_dir": "relative"}, "not an absolute path"),
    ({"variants": []}, "at least one entry"),
    ({"variants": [variant({"class": "Absent", "position": "end"})]}, "class Absent stands there 0 times"),
    ({"variants": [variant(lines=["if x:"])]}, "not Python"),
    ({"variants": [variant(lines=["x = 1", "return 2"], anchor={"position": "end"})]}, "would not compile"),
    ({"variants": [{"name": "a", "edits": [{"anchor": {"position": "end"}, "lines": {"a": 1}}]}]}, "neither a list"),
    ({"variants": [{"name": "a"}]}, "edits"),
    ({"marker": ""}, "The marker"),
    ({"state": "elsewhere"}, "state"),
]


def test_wrong_input_gives_a_message_and_never_a_traceback(module):  # 24
    results = module.run([{**arguments, "check": bool(index % 2)} for index, (arguments, _) in enumerate(WRONG)])
    for (arguments, words), result in zip(WRONG, results):
        assert result["failed"], arguments
        assert words in result["msg"], arguments
        assert not result.get("changed")
    assert module.place.read() == MODEL
    assert not module.place.backup.exists()


def test_a_foreign_edit_is_refused_in_check_mode_too(module):
    module.place.present()
    module.place.file.write_bytes(module.place.read() + b"theirs = 1\n")
    (result,) = module.run([{"check": True}])
    assert result["reason"] == "foreign"
    assert "theirs = 1" in result["msg"]


def test_documentation_is_complete_and_its_examples_are_valid(module):
    import yaml

    text = subprocess.run(
        [str(Path(str(ANSIBLE)).with_name("ansible-doc")), "-t", "module", "--json", "source_patch"],
        env=module.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    document = json.loads(text)["source_patch"]
    options = document["doc"]["options"]
    assert set(options) == {"path", "state", "backup_dir", "variants", "marker", "journal"}
    (returned,) = module.run([{}])
    documented = set(document["return"])
    added_by_ansible = {
        "all",
        "failed",
        "changed",
        "uid",
        "gid",
        "owner",
        "group",
        "mode",
        "size",
        "state",
        "secontext",
    }
    assert set(returned) - added_by_ansible <= documented
    from sglang_hs import source_edit

    for task in yaml.safe_load(document["examples"]):
        arguments = task["source_patch"]
        assert set(arguments) <= set(options)
        if isinstance(arguments.get("variants"), list):
            assert list(source_edit._variant_troubles(arguments["variants"])) == []


def open_run(folder):
    """(where its journal is, the argument ``journal`` for an edit that is its step)."""
    paths = Paths(str(folder / "state"))
    paths.make()
    view = {"settings": {"window_s": 3600, "stop_timeout": 5, "extraction_port": 1}, "flags": {"key": "k", "names": []}}
    run = Journal.open(paths, "me@laptop", view, {"window": "1h"}, {"argv": ["x"], "expected": "running"})
    return paths, {"state_dir": str(paths.state), "run_id": run.run_id, "step": "patch"}


def records(paths):
    run = Journal.load(paths)
    assert run is not None
    return [(record["step"], record["state"], record["detail"]) for record in run.document["steps"]]


def test_an_edit_that_is_a_step_of_a_run_is_recorded_in_its_journal(module, tmp_path):
    """Before it and after it, with what was done; a refusal has a beginning and no end; nothing in check mode."""
    paths, journal = open_run(tmp_path)
    absent = [variant({"class": "Absent", "position": "end"})]
    module.run([{"check": True, "journal": journal}])
    assert records(paths) == []
    refused, done = module.run([{"journal": journal, "variants": absent}, {"journal": journal}])
    assert refused["reason"] == "no_variant" and done["changed"]
    assert records(paths) == [("patch", "begun", ""), ("patch", "begun", ""), ("patch", "done", done["msg"])]


def test_an_edit_for_a_run_that_is_over_is_refused_with_the_file_as_it_was(module, tmp_path):
    _, journal = open_run(tmp_path)
    (refused,) = module.run([{"journal": {**journal, "run_id": "20260101-000000-aaaa"}}])
    assert refused["failed"] and refused["reason"] == "journal"
    assert "no longer open" in refused["msg"] and "Next: " in refused["msg"]
    assert module.place.read() == MODEL and module.place.kept() == []


def test_an_end_that_cannot_be_recorded_tells_that_the_file_is_edited(tmp_path, monkeypatch):
    import ansible.module_utils

    monkeypatch.setattr(
        ansible.module_utils, "__path__", [*ansible.module_utils.__path__, str(REPOSITORY / "module_utils")]
    )
    spec = importlib.util.spec_from_file_location("source_patch_module", REPOSITORY / "library/source_patch.py")
    assert spec is not None and spec.loader is not None
    source_patch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source_patch)
    paths, journal = open_run(tmp_path)
    with (
        pytest.raises(Exception, match="Left as it was: the file, which is edited by now") as refused,
        source_patch._step(journal),
    ):
        paths.journal.rename(tmp_path / "away")
        paths.journal.mkdir()
    assert type(refused.value).__name__ == "HsError" and "Next: " in str(refused.value)
