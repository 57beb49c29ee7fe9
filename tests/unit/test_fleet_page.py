"""The page over all hosts: what there is, which host has it, and a link to each one's last report; what cannot be written is told alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
PLAY = """\
- hosts: sglang
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: fleet, tasks_from: page}
"""
CATALOGUE: dict[str, Any] = {
    "samples": 1234,
    "tokens": 56789,
    "bytes": 40600000,
    "twice": 7,
    "of": {"samples": 1300, "tokens": 60000},
    "complete": False,
    "identity": {"release": "0.5.23", "boundaries": [3, 31], "final": "pre_norm", "dataset_sha256": "ab" * 32},
    "hosts": {
        "one": {"output": "/data/<b>", "samples": 1000, "finished": 1007, "remotes": {"far:x": 12}},
        "one-20260101-000000-a": {"output": "/data", "samples": 200, "finished": 200, "remotes": {}},
        "lost": {"output": "/data", "samples": 34, "finished": 34, "remotes": {}},
    },
}


def play(folder: Path, reports: str) -> tuple[int, str]:
    (folder / "play.yml").write_text(PLAY)
    extra = {
        "hs_report_dir": reports,
        "hs_catalogue": dict(CATALOGUE, path=str(folder / "fleet/0123abcd/catalogue.jsonl")),
    }
    hosts = {name: {"ansible_connection": "local"} for name in ("one", "one-20260101-000000-a")}
    (folder / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": hosts}}))
    words = [str(Path(sys.executable).parent / "ansible-playbook"), str(folder / "play.yml")]
    words += ["-i", str(folder / "hosts.yml"), "-e", json.dumps(extra)]
    env = {
        **os.environ,
        "HOME": str(folder),
        "ANSIBLE_HOME": str(folder),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def test_one_page_has_all_hosts_and_links_to_their_own(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    for name in (
        "one-20260101-000000-aa",
        "one-20260203-000000-bb",
        "one-20260101-000000-a-20260301-000000-cc",
        "one-photo",
    ):
        (reports / f"{name}.html").touch()
    code, out = play(tmp_path, str(reports))
    assert code == 0, out
    assert "changed=1" not in out
    page = (reports / "fleet-0123abcd.html").read_text()
    rows = [row for row in page.split("<tr>") if "<td>" in row]
    assert len(rows) == 3
    lost, one, other = rows
    assert "lost (not there, counted as last seen)" in lost and "none" in lost
    assert 'href="one-20260203-000000-bb.html"' in one and "12 at far:x" in one
    assert 'href="one-20260101-000000-a-20260301-000000-cc.html"' in other
    assert "1,234" in page and "of 1,300" in page and "40.6 MB" in page and "Not complete" in page
    assert "<b>" not in one and "&lt;b&gt;" in one
    # the folder is a file: told, and nothing fails
    (tmp_path / "file").touch()
    code, out = play(tmp_path, str(tmp_path / "file"))
    assert code == 0, out
    assert "the page over all hosts was not written" in out
