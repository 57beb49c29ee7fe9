"""The hooks around a host's absence: called where they are to be, told in their own words where they fail, and by the restore program too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_hs import restore
from sglang_hs.errors import HsError
from sglang_hs.journal import Paths

REPO = Path(__file__).resolve().parents[2]
PLAY = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: load_balancer, tasks_from: return}
"""


# as in extract.yml, on a host that nobody took away from production
RUN = """\
- hosts: all
  gather_facts: false
  vars:
    hs_run: {run_id: none}
    hs_result: {samples: 0, tokens: 0, bytes: 0}
  tasks:
    - block:
        - ansible.builtin.fail: {msg: the client failed}
          when: broken | default(false)
      rescue:
        - ansible.builtin.import_role: {name: restore_production, tasks_from: remember}
      always:
        - ansible.builtin.import_role: {name: restore_production}
          vars: {hs_restore_run: none}
        - ansible.builtin.debug: {msg: the report is written}
        - ansible.builtin.import_role: {name: restore_production, tasks_from: raise}
"""
LOOK = """\
- hosts: sglang
  gather_facts: false
  vars:
    hs_found: {open_run: {}, view: {settings: {production_expected: running}}}
    __fleet_plan: false
  tasks:
    - ansible.builtin.import_role: {name: fleet, tasks_from: divide}
"""
RESTORE = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.import_role: {name: restore_production}
"""


def play(folder: Path, hook: dict[str, Any], text: str = PLAY, **more: Any) -> tuple[int, str]:
    (folder / "play.yml").write_text(text)
    (folder / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": {"one": {}}}}))
    extra = {
        "hs_after_returning": hook,
        "hs_state_dir": str(folder),
        "hs_hook_timeout": 20,
        "ansible_python_interpreter": sys.executable,
        "ansible_remote_tmp": str(folder / "tmp"),
        **more,
    }
    words = [str(Path(sys.executable).parent / "ansible-playbook"), str(folder / "play.yml")]
    words += ["-i", str(folder / "hosts.yml"), "-c", "local", "-e", json.dumps(extra)]
    env = {
        **os.environ,
        "HOME": str(folder),
        "ANSIBLE_HOME": str(folder),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("where", ["controller", "host"])
def test_a_command_is_called_for_a_host_that_is_out_and_only_then(tmp_path: Path, where: str) -> None:
    hook = {"command": ["sh", "-c", f"echo {{{{ inventory_hostname }}}} >> {tmp_path}/called"], "where": where}
    code, out = play(tmp_path, hook)
    assert (code, (tmp_path / "called").exists()) == (0, False), out
    (tmp_path / "left").write_text("run\n")
    code, out = play(tmp_path, hook)
    assert code == 0, out
    assert (tmp_path / "called").read_text() == "one\n"
    assert not (tmp_path / "left").exists()


def test_a_command_that_fails_is_told_in_its_own_words_and_called_again_next_time(tmp_path: Path) -> None:
    (tmp_path / "left").write_text("run\n")
    code, out = play(tmp_path, {"command": ["sh", "-c", "echo no such server >&2; exit 3"]})
    assert code == 2
    assert "ended with 3: no such server" in " ".join(out.split())
    assert (tmp_path / "left").exists()


@pytest.mark.parametrize(
    "hook",
    [
        {"url": "http://127.0.0.1:9/", "where": "host"},
        {"command": ["true"], "where": "hosts"},
        {"cmd": ["true"]},
        {"command": "true now"},
        {"command": ["true"], "url": "http://127.0.0.1:9/"},
    ],
)
def test_a_hook_that_would_do_nothing_is_refused_and_the_host_stays_out(tmp_path: Path, hook: dict[str, Any]) -> None:
    (tmp_path / "left").write_text("run\n")
    code, out = play(tmp_path, hook)
    assert code == 2, out
    assert "hs_after_returning holds" in out
    assert (tmp_path / "left").exists()


def test_a_hook_that_fails_hides_neither_the_report_nor_the_failure_before_it(tmp_path: Path) -> None:
    (tmp_path / "left").write_text("run\n")
    hook = {"command": ["sh", "-c", "echo no such server >&2; exit 3"]}
    code, out = play(tmp_path, hook, RUN)
    out = " ".join(out.split())
    assert (code, "the report is written" in out) == (2, True), out
    assert "Hook | see that it was done: the hook sh -c" in out.split("the report is written")[1]
    code, out = play(tmp_path, hook, RUN, broken=True)
    out = " ".join(out.split())
    assert (code, "the client failed" in out.split("the report is written")[1]) == (2, True), out
    assert "still out of its load balancer, production answers: the hook sh -c" in out
    # restore.yml alone has nothing to write down
    code, out = play(tmp_path, hook, RESTORE)
    assert (code, "no such server" in out, "which puts the host in again" in out) == (2, True, True), out
    assert (tmp_path / "left").exists()


def test_a_host_that_nobody_put_back_is_put_back_before_it_counts_as_serving(tmp_path: Path) -> None:
    hook = {"command": ["touch", str(tmp_path / "called")]}
    (tmp_path / "left").write_text("run\n")
    plan = LOOK.replace("    __fleet_plan: false\n", "")
    code, out = play(tmp_path, hook, plan, hs_keep_serving="0")
    assert (code, (tmp_path / "called").exists()) == (0, False), out
    code, out = play(tmp_path, hook, LOOK, hs_keep_serving="0")
    assert (code, (tmp_path / "called").exists(), (tmp_path / "left").exists()) == (0, True, False), out


def test_a_call_by_http(tmp_path: Path) -> None:
    asked: list[tuple[str, str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers["X-Token"], body))
            self.send_response(204 if self.path == "/ready/one" else 500)
            self.end_headers()

        def log_message(self, format: str, *words: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "left").write_text("run\n")
    hook: dict[str, Any] = {"headers": {"X-Token": "t"}, "body": "on", "status": [200, 204]}
    where = f"http://127.0.0.1:{server.server_port}"
    assert play(tmp_path, {**hook, "url": f"{where}/wrong"})[0] == 2
    code, out = play(tmp_path, {**hook, "url": f"{where}/ready/{{{{ inventory_hostname }}}}"})
    server.shutdown()
    assert code == 0, out
    assert asked[-1] == ("/ready/one", "t", b"on")
    assert not (tmp_path / "left").exists()


def test_the_restore_program_calls_it_once_production_answers(tmp_path: Path) -> None:
    paths, report = Paths(str(tmp_path)), restore.Report()
    called = tmp_path / "called"
    journal: Any = SimpleNamespace(settings={"after_returning": ["touch", str(called)], "hook_timeout": 20})
    restore._return(paths, journal, report)
    assert not called.exists()  # the host is in
    paths.left.write_text("run\n")
    report.failures.append("check production: no answer")
    with pytest.raises(HsError, match="stays out"):
        restore._return(paths, journal, report)
    assert not called.exists()
    report.failures.clear()
    restore._return(paths, journal, report)
    assert called.exists()
    assert not paths.left.exists()
    assert report.lines == ["put the host into its load balancer again"]
    paths.left.write_text("run\n")
    journal.settings["after_returning"] = ["sh", "-c", "echo refused; exit 1"]
    with pytest.raises(HsError, match="sh ended with 1: refused"):
        restore._return(paths, journal, report)
    assert paths.left.exists()


def test_it_is_a_step_of_the_restore_where_it_is_a_command_of_the_host() -> None:
    settings = {"stop_timeout": 1, "production_timeout": 1, "hook_timeout": 7}
    plain: Any = SimpleNamespace(settings=settings)
    hooked: Any = SimpleNamespace(settings={**settings, "after_returning": ["true"]})
    assert [name for name, _, _ in restore._steps(hooked)] == [
        *[name for name, _, _ in restore._steps(plain)],
        "return",
    ]
