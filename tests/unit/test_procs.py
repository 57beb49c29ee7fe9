"""Processes found, adopted, ended: with real processes of this machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_hs import procs, production, spawn

# A server with two children that do not end with it; the first child ignores SIGTERM, as a hanging scheduler would.
SERVER = """
import os, signal, socket, sys, time
listener = socket.socket(); listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1]))); listener.listen()
for ignores in (True, False):
    if os.fork() == 0:
        if ignores: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
print("ready", flush=True)
time.sleep(600)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, Path]]:
    port = free_port()
    log = tmp_path / "its.log"
    folder = tmp_path / "its folder"
    folder.mkdir()
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port), "an argument with spaces", ""],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "SECRET": "a=b\nc", "EMPTY": ""},
            stdout=out,
            stderr=out,
            umask=0o027,
            start_new_session=True,
        )
    until = time.monotonic() + 20
    while b"ready" not in log.read_bytes() and time.monotonic() < until:
        time.sleep(0.02)
    yield process, port, log
    for member in procs.everyone():
        if str(port) in member.argv:
            os.kill(member.pid, signal.SIGKILL)
    process.wait()


def test_the_listener_is_found_with_its_family(served: tuple[subprocess.Popen[bytes], int, Path]) -> None:
    process, port, _ = served
    found = procs.listeners(port)
    assert [(listener.address, listener.port) for listener in found] == [("127.0.0.1", port)]
    assert found[0].process is not None
    assert found[0].process.pid == process.pid  # not one of the children, which inherited the socket
    assert len(procs.family(process.pid)) == 3


def test_an_adopted_process_is_started_again_exactly_so(served: tuple[subprocess.Popen[bytes], int, Path]) -> None:
    process, port, log = served
    found = procs.listeners(port)[0].process
    assert found is not None
    before = procs.adoption(found)
    assert before["argv"] == [sys.executable, "-c", SERVER, str(port), "an argument with spaces", ""]
    assert before["env"]["SECRET"] == "a=b\nc"
    assert before["env"]["EMPTY"] == ""
    assert before["umask"] == 0o027
    assert before["stdout"] == str(log)

    killed = procs.end(procs.family(found.pid), 1.0)
    process.wait()
    assert len(killed) == 2, "both children outlived their TERMed parent and had to be killed"
    assert procs.port_free(port)

    again = spawn.detached(before, before["stdout"])
    try:
        until = time.monotonic() + 20
        while not procs.listeners(port) and time.monotonic() < until:
            time.sleep(0.02)
        after = procs.adoption(again)
        same = ("argv", "env", "cwd", "uid", "gid", "groups", "umask", "limits", "stdout", "stderr", "exe")
        assert {key: after[key] for key in same} == {key: before[key] for key in same}
        assert again.session == again.pid
    finally:
        procs.end(procs.family(again.pid), 0.2)


def test_nobody_outside_the_family_is_touched(served: tuple[subprocess.Popen[bytes], int, Path]) -> None:
    process, _, _ = served
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        procs.end(procs.family(process.pid), 0.3)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_pid_that_was_given_anew_is_not_signalled() -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        found = procs.read(sleeper.pid)
        assert found is not None
        procs.signal_process(found._replace(start=found.start - 1), signal.SIGKILL)
        time.sleep(0.1)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_zombie_counts_as_gone() -> None:
    child = subprocess.Popen(["true"])
    until = time.monotonic() + 10
    while procs.read(child.pid) is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert procs.read(child.pid) is None
    child.wait()


def test_what_a_restore_starts_heeds_its_sigterm(tmp_path: Path) -> None:
    """The restore program shrugs off signals; what it starts must not inherit that."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from sglang_hs import __main__ as program, spawn; import os, signal\n"
        "for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM): signal.signal(number, program._ignore)\n"
        "child = spawn.detached({'argv': ['sleep', '60'], 'env': dict(os.environ), 'cwd': '/'}, None)\n"
        "print(child.pid)"
    )
    library = str(Path(spawn.__file__).parents[1])
    pid = int(subprocess.run([sys.executable, "-c", code, library], capture_output=True, check=True).stdout)
    found = procs.read(pid)
    assert found is not None
    os.kill(pid, signal.SIGTERM)
    assert spawn.wait_gone([found], 5) == []


def test_a_process_that_does_not_belong_to_a_unit_has_none() -> None:
    assert procs.unit_of(2**22 + 1) is None


def test_the_url_of_a_server_that_listens_everywhere_is_loopback() -> None:
    assert production.url_of(30000, "0.0.0.0") == "http://127.0.0.1:30000"
    assert production.url_of(30000, "::") == "http://127.0.0.1:30000"
    assert production.url_of(30000, "::1") == "http://[::1]:30000"
