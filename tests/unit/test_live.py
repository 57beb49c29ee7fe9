"""The progress of a run as an operator sees it: in place on a real terminal, a line now and then in a log, whatever else is set."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import fsio, procs
from sglang_hs.journal import Journal, Paths

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "docs/tools"))

from terminal import Session, Terminal  # noqa: E402

PLAYBOOK = str(Path(sys.executable).parent / "ansible-playbook")
SETTINGS = {
    "window_s": 3600,
    "stop_timeout": 1,
    "launch_timeout": 300,
    "extraction_port": 1,
    "tensor_parallel": 1,
    "dump_dir": "/nowhere/dumps",
    "engine": {"model_file": "/nowhere/deepseek_v2.py"},
}
RECORD = {
    "argv": ["x"],
    "expected": "stopped",
    "port": 1,
    "url": "http://127.0.0.1:1",
    "api_key": "",
    "kind": "process",
}
MEASURED = {
    "phase": "extract",
    "total": 64,
    "done": 0,
    "failed": 0,
    "quarantined": 0,
    "tokens_done": 0,
    "tokens_per_s": 2000.0,
    "bytes_per_s": 0.25e9,
    "eta_s": 75,
    "dump_free": 31.5e9,
    "output_free": 2.5e12,
}


class Watched:
    """A host whose extraction is at work: an open run, and a living process as its client. The test says how far it is."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.paths = Paths(str(folder / name))
        self.paths.make()
        self.journal = Journal.open(self.paths, "me@laptop", {"settings": SETTINGS, "flags": {}}, {}, RECORD)
        self.journal.record("extract", "begun")
        self.child = subprocess.Popen(["sleep", "600"])
        found = procs.read(self.child.pid)
        me = procs.read(os.getpid())
        assert found is not None and me is not None
        state = {
            "pid": found.pid,
            "start": found.start,
            "supervisor": me.pid,
            "supervisor_start": me.start,
            "asked": 1.0,
        }
        for job in ("client", "server"):
            fsio.write_json(self.journal.folder / f"{job}.state.json", state)

    def at(self, **changes: Any) -> None:
        fsio.write_json(self.journal.folder / "progress.json", {**MEASURED, "updated": time.time(), **changes})

    def over(self) -> None:
        result = {"outcome": "complete", "message": "64 of 64 samples are there"}
        fsio.write_json(self.journal.folder / "result.json", result)
        state = fsio.read_json(self.journal.folder / "client.state.json")
        fsio.write_json(self.journal.folder / "client.state.json", {**state, "ended": time.time(), "code": 0})
        self.end()

    def end(self) -> None:
        self.child.kill()
        self.child.wait()


class Play:
    """A playbook that watches hosts, each in a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Watched] = {}
        self.more: dict[str, dict[str, Any]] = {}
        self.sessions: list[Session] = []

    def host(self, name: str) -> Watched:
        self.hosts[name] = Watched(name, self.folder)
        return self.hosts[name]

    def command(self, *words: str, log_every: float = 3600) -> list[str]:
        local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable, "patience": 900}
        hosts = {
            name: {**local, "state": str(host.paths.state), "run": host.journal.run_id}
            for name, host in self.hosts.items()
        }
        inventory, book = self.folder / "hosts.json", self.folder / "book.json"
        inventory.write_text(json.dumps({"all": {"hosts": {**hosts, **self.more}}}))
        watch = {
            "state_dir": "{{ state }}",
            "run_id": "{{ run }}",
            "what": "extract",
            "log_every": log_every,
            "patience": "{{ patience }}",
        }
        tasks = [
            {"name": "Watch", "hs_watch": watch},
            {"name": "After", "ansible.builtin.debug": {"msg": "what comes after"}},
        ]
        book.write_text(json.dumps([{"name": "Live", "hosts": "all", "gather_facts": False, "tasks": tasks}]))
        return [PLAYBOOK, str(book), "-i", str(inventory), *words]

    def env(self, **more: str) -> dict[str, str]:
        kept = {
            key: word
            for key, word in os.environ.items()
            if not key.startswith(("ANSIBLE_", "NO_COLOR", "PYTHONUNBUFFERED"))
        }
        private = {
            "HOME": str(self.folder),
            "ANSIBLE_HOME": str(self.folder / "ansible"),
            "ANSIBLE_REMOTE_TEMP": str(self.folder / "remote"),
            "TERM": "xterm-256color",
        }
        return {**kept, **private, "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"), **more}

    def on_terminal(self, *words: str, columns: int = 120, lines: int = 30, **env: str) -> Session:
        self.sessions.append(Session(self.command(*words), columns, lines, self.env(**env), REPO))
        return self.sessions[-1]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path)
    yield play
    for session in play.sessions:
        session.end()
    for host in play.hosts.values():
        host.end()


def line_of(terminal: Terminal, host: str) -> str:
    """The last line on the screen that is the host's progress."""
    found = [line for line in terminal.text() if line.startswith(f"  {host}: ") and "are there" not in line]
    assert len(found) <= 1, "a line is drawn twice:\n" + "\n".join(terminal.text())
    return found[0] if found else ""


def colour_of(terminal: Terminal, host: str) -> str:
    row = next(row for row in terminal.rows if "".join(cell.text for cell in row).startswith(f"  {host}: "))
    return row[2].colour


def test_two_hosts_have_a_line_each_that_is_drawn_in_place_and_gone_before_anything_else(play: Play) -> None:
    one, two = play.host("gpu1"), play.host("gpu2")
    one.at()
    two.at()
    session = play.on_terminal()
    session.until("both lines", lambda t: "0/64" in line_of(t, "gpu1") and "0/64" in line_of(t, "gpu2"))
    one.at(done=16, tokens_done=12345)
    session.until("one went on", lambda t: "16/64 samples (25 %) | 12.3k tokens | 2,000 tokens/s" in line_of(t, "gpu1"))
    two.at(done=32, failed=1, quarantined=2)
    session.until("the other too", lambda t: "32/64 samples (50 %) | 1 errors | 2 in quarantine" in line_of(t, "gpu2"))
    assert colour_of(session.terminal, "gpu1") == "" and colour_of(session.terminal, "gpu2") != ""
    for name in ("gpu1", "gpu2"):
        # cut, and never wrapped
        assert len(line_of(session.terminal, name)) <= 119
    one.over()
    # its line goes with it; what its result prints stands above the block that is drawn anew for the other
    session.until("only the other", lambda t: not line_of(t, "gpu1") and "32/64" in line_of(t, "gpu2"))
    two.over()
    assert session.finish() == 0
    text = session.terminal.text()
    # how each ended stays, and nothing of the way there
    ended = ["  gpu1: 64 of 64 samples are there", "  gpu2: 64 of 64 samples are there"]
    assert sorted(line for line in text if line.startswith("  gpu")) == ended, text
    assert [line for line in text if line.startswith("ok: [gpu1]")] and "PLAY RECAP" in "\n".join(text)
    banner = text.index(next(line for line in text if line.startswith("TASK [Watch]")))
    assert text[banner + 1] in ended, text


def test_one_fork_another_callback_no_colour_and_a_narrow_terminal(play: Play) -> None:
    one, two = play.host("gpu1"), play.host("gpu2")
    one.at(quarantined=3)
    two.at(done=8)
    session = play.on_terminal(
        "--forks", "1", columns=40, ANSIBLE_STDOUT_CALLBACK="minimal", NO_COLOR="1", ANSIBLE_STRATEGY="linear"
    )
    session.until("a line", lambda t: "0/64" in line_of(t, "gpu1"))
    assert line_of(session.terminal, "gpu1") == "  gpu1: 0/64 samples (0 %) | 0 errors |"[:39]
    assert not {cell.colour for row in session.terminal.rows for cell in row} - {""}
    one.over()
    session.until("the next host", lambda t: "8/64" in line_of(t, "gpu2") and not line_of(t, "gpu1"))
    two.over()
    assert session.finish() == 0
    assert not line_of(session.terminal, "gpu1") and not line_of(session.terminal, "gpu2")


def test_ctrl_c_leaves_no_line_behind(play: Play) -> None:
    play.host("gpu1").at()
    session = play.on_terminal()
    session.until("a line", lambda t: "0/64" in line_of(t, "gpu1"))
    os.killpg(session.process.pid, 2)
    assert session.finish() != 0
    assert "User interrupted execution" in "\n".join(session.terminal.text())
    assert not line_of(session.terminal, "gpu1")


def test_without_the_callback_a_terminal_gets_what_a_log_gets(play: Play) -> None:
    host = play.host("gpu1")
    host.at()
    session = play.on_terminal(columns=200, ANSIBLE_CALLBACKS_ENABLED="hs_exit_status")
    session.until("a line", lambda t: "0/64" in line_of(t, "gpu1"))
    host.over()
    assert session.finish() == 0
    assert "0/64 samples" in line_of(session.terminal, "gpu1"), "it stays"


def test_a_log_gets_a_line_at_a_change_of_phase_and_else_now_and_then(play: Play) -> None:
    host = play.host("gpu1")
    host.at(phase="canary", message="3 of 4 sequences")
    log = play.folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            play.command(), cwd=REPO, env=play.env(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )

    def lines() -> list[str]:
        return [line for line in log.read_text().splitlines() if line.startswith("  gpu1: ")]

    def wait(number: int) -> None:
        until = time.monotonic() + 120
        while len(lines()) < number:
            assert time.monotonic() < until and process.poll() is None, log.read_text()
            time.sleep(0.1)

    # each line is in the log when it is written, not when a buffer is full
    wait(1)
    assert "canary: 3 of 4 sequences" in lines()[0]
    host.at(done=1)
    wait(2)
    for done in range(2, 5):
        host.at(done=done)
        time.sleep(1.5)  # it is asked every second, give or take
    assert len(lines()) == 2, "nothing changed but numbers, and log_every is an hour"
    host.at(phase="finish", message="describing the output", done=64)
    wait(3)
    assert "64/64 samples (100 %)" in lines()[2] and "describing the output" in lines()[2]
    host.over()
    assert process.wait(timeout=120) == 0
    assert "\x1b" not in log.read_text() and "\r" not in log.read_text()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client")
def test_a_cut_link_says_since_when_and_other_hosts_go_on(play: Play) -> None:
    host = play.host("gpu1")
    host.at(done=7)
    gone = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0, "patience": 2}
    play.more["gone"] = {**gone, "state": "/nowhere", "run": "x", "ansible_python_interpreter": sys.executable}
    session = play.on_terminal(columns=150)
    session.until(
        "no link", lambda t: "no link since " in line_of(t, "gone") and "the job goes on there" in line_of(t, "gone")
    )
    session.until("the other one", lambda t: "7/64" in line_of(t, "gpu1"))
    session.until("given up", lambda t: any("UNREACHABLE" in line for line in t.text()))
    host.over()
    assert session.finish() == 4
