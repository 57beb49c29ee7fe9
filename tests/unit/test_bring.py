"""The data set comes from the controller or from a real HTTP server: once, its own rows where that is less, and never with another sha256."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))

import far as remotes  # noqa: E402

TEXT = '{"input_ids": [1, 2]}\n'
PLAY = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: fleet, tasks_from: fetch}
    - ansible.builtin.import_role: {name: fleet, tasks_from: bring}
"""


class Counting(SimpleHTTPRequestHandler):
    """Serves a folder, and counts what is asked for."""

    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *words: Any) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www/set.jsonl").write_text(TEXT)
    Counting.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Counting, directory=str(tmp_path / "www")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/set.jsonl"
    server.shutdown()


def play(folder: Path, source: str, sha256: str = "", rows: str = "", **more: Any) -> tuple[int, str]:
    (folder / "play.yml").write_text(PLAY)
    extra = {
        "hs_dataset_source": source,
        "hs_dataset_sha256": sha256,
        "hs_dataset": str(folder / "host/set.jsonl"),
        "hs_fleet_dir": str(folder / "fleet"),
        "hs_part": {"rows": rows},
        "hs_found": {"open_run": {}},
        "ansible_python_interpreter": sys.executable,
        "ansible_remote_tmp": str(folder / "tmp"),
        **more,
    }
    words = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        str(folder / "play.yml"),
        "-i",
        "one,",
        "-c",
        "local",
    ]
    env = {
        **os.environ,
        "HOME": str(folder),
        "ANSIBLE_HOME": str(folder),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }
    done = subprocess.run(
        [*words, "-e", json.dumps(extra)], cwd=REPO, env=env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_from_a_url_once_and_only_with_its_sha256(tmp_path: Path, url: str) -> None:
    right = hashlib.sha256(TEXT.encode()).hexdigest()
    code, out = play(tmp_path, url)
    assert code == 2
    assert "is no sha256" in out
    code, out = play(tmp_path, url, right[::-1])
    assert code == 2
    assert not (tmp_path / "host/set.jsonl").exists()
    Counting.asked.clear()
    code, out = play(tmp_path, url, right)
    assert code == 0, out
    assert (tmp_path / "host/set.jsonl").read_text() == (tmp_path / "fleet/set.jsonl").read_text() == TEXT
    assert len(Counting.asked) == 2  # the controller's and the host's
    code, out = play(tmp_path, url, right)
    assert (code, "changed=0" in out) == (0, True), out
    assert len(Counting.asked) == 2


def test_from_the_controller_whole_or_the_rows_alone(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_text(TEXT[:5])
    code, out = play(tmp_path, str(tmp_path / "set.jsonl"), rows=str(tmp_path / "rows.jsonl"))
    assert code == 0, out
    assert (tmp_path / "host/set.jsonl.rows.jsonl").read_text() == TEXT[:5]
    assert not (tmp_path / "host/set.jsonl").exists()
    code, out = play(tmp_path, str(tmp_path / "set.jsonl"))
    assert code == 0, out
    assert (tmp_path / "host/set.jsonl").read_text() == TEXT
    code, out = play(tmp_path, str(tmp_path / "set.jsonl"))
    assert "changed=0" in out


def test_an_open_run_is_sent_nothing(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text(TEXT)
    code, out = play(tmp_path, str(tmp_path / "set.jsonl"), hs_found={"open_run": {"run_id": "x"}})
    assert (code, (tmp_path / "host").exists()) == (0, False), out


def test_a_folder_is_there_under_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set/part-0.parquet").write_text("x")
    (tmp_path / "host/set").mkdir(parents=True)
    code, out = play(tmp_path, str(tmp_path / "set"), hs_dataset=str(tmp_path / "host/set"))
    assert code == 0, out
    assert [path.name for path in (tmp_path / "host/set").iterdir()] == ["part-0.parquet"]


def test_from_a_remote_once_and_only_with_its_sha256(tmp_path: Path) -> None:
    right, text = hashlib.sha256(TEXT.encode()).hexdigest(), "{}"
    far = remotes.Far(tmp_path / "remote", "webdav")
    rclone = {"hs_dataset_rclone": str(far.rclone), "hs_dataset_rclone_config": str(far.config)}
    code, out = play(tmp_path, "far:sets/set.jsonl", **rclone)
    assert code == 2 and "is no sha256" in out
    code, out = play(tmp_path, "far:sets/set.jsonl", right, **rclone)  # the server does not run
    assert code == 2 and "has the sha256 of no file" in out and "rclone said: " in out and "connection refused" in out
    (far.root / "sets").mkdir()
    (far.root / "sets/set.jsonl").write_text(TEXT)
    (far.root / "other").mkdir()
    (far.root / "other/set.jsonl").write_text(text)
    with far.serving():
        code, out = play(tmp_path, "far:other/set.jsonl", right, **rclone)
        assert code == 2 and hashlib.sha256(text.encode()).hexdigest() in out and not (tmp_path / "host").exists()
        code, out = play(tmp_path, "far:sets/set.jsonl", right.upper(), **rclone)
        assert code == 0, out
        assert (tmp_path / "host/set.jsonl").read_text() == (tmp_path / "fleet/set.jsonl").read_text() == TEXT
    code, out = play(tmp_path, "far:sets/set.jsonl", right, **rclone)  # not asked again
    assert (code, "changed=0" in out) == (0, True), out
