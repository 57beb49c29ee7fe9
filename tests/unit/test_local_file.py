"""What a playbook leaves on the controller: whole or not at all, as whoever started it, whatever the host's connection is."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


def play(folder: Path, *options: str, **words: Any) -> dict[str, Any]:
    """Run the action for a host that nobody can reach, as root there: its result."""
    task = {"hs_local_file": words, "register": "said", "ignore_errors": True, "check_mode": "--check" in options}
    here = {"ansible_connection": "local", "ansible_become": False, "ansible_python_interpreter": sys.executable}
    copy = {"content": "{{ said | to_json }}", "dest": str(folder / "said.json")}
    tell = {"ansible.builtin.copy": copy, "delegate_to": "localhost", "vars": here, "check_mode": False}
    book = [{"hosts": "all", "gather_facts": False, "become": True, "tasks": [task, tell]}]
    (folder / "play.json").write_text(json.dumps(book))
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "ANSIBLE_HOME": str(folder / ".ansible"),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
    }
    command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "192.0.2.1,", str(folder / "play.json")]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads((folder / "said.json").read_text())
    return found


def test_it_is_written_once_and_makes_its_folder(tmp_path: Path) -> None:
    dest = tmp_path / "pages/deep/page.html"
    for changed in (True, False):
        said = play(tmp_path, dest=str(dest), content="<p>Grüße</p>\n", mode="0640")
        assert said["changed"] is changed and said["dest"] == str(dest)
        assert dest.read_text() == "<p>Grüße</p>\n" and stat.S_IMODE(dest.stat().st_mode) == 0o640
    dest.chmod(0o600)
    assert play(tmp_path, dest=str(dest), content="<p>Grüße</p>\n", mode="0640")["changed"]
    assert stat.S_IMODE(dest.stat().st_mode) == 0o640
    assert [path.name for path in dest.parent.iterdir()] == ["page.html"]


@pytest.mark.parametrize("data", [{"a": 1, "b": "x"}, {"a": None, "b": [True, 0.5], "c": "ü"}])
def test_json_is_json_whatever_ansible_makes_of_it_on_the_way(tmp_path: Path, data: dict[str, Any]) -> None:
    play(
        tmp_path,
        dest=str(tmp_path / "result.json"),
        content="{{ " + json.dumps(data, ensure_ascii=False).replace("null", "none") + " | to_nice_json }}\n",
    )
    assert json.loads((tmp_path / "result.json").read_text()) == data


def test_check_mode_writes_nothing_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    os.symlink("there", tmp_path / "link")
    assert play(tmp_path, "--check", dest=str(tmp_path / "link"), content="new")["changed"]
    assert (tmp_path / "there").read_text() == "old"
    play(tmp_path, dest=str(tmp_path / "link"), content="new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"


def test_a_place_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    said = play(tmp_path, dest=str(tmp_path / "file/page.html"), content="new")
    assert (
        said["failed"]
        and "Not a directory" in said["msg"]
        and "Left as it was" in said["msg"]
        and "Next: " in said["msg"]
    )
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "folder").mkdir()
    said = play(tmp_path, dest=str(tmp_path / "folder"), content="new")
    assert said["failed"] and "Is a directory" in said["msg"]
