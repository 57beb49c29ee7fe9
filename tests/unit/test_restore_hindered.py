"""What must not keep a restore from its work: a full disk, a restore that hangs, somebody else's lock."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import fsio, procs, restore
from sglang_hs.errors import HsError
from sglang_hs.journal import BALLAST, Journal, Paths

VIEW: dict[str, Any] = {
    "settings": {
        "window_s": 3600,
        "stop_timeout": 1,
        "production_timeout": 1,
        "extraction_port": 1,
        "dump_dir": "/nowhere/dumps",
        "engine": {"model_file": "/nowhere/deepseek_v2.py"},
    },
    "flags": {"key": "k", "names": []},
}
DOWN = {"argv": ["x"], "expected": "stopped", "port": 1, "url": "http://127.0.0.1:1", "api_key": "", "kind": "process"}
REPO = Path(__file__).resolve().parents[2]


def begun(state: Path) -> Journal:
    paths = Paths(str(state))
    paths.make()
    return Journal.open(paths, "me@laptop", VIEW, {}, DOWN)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return begun(tmp_path / "state")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 12 MiB, real as far as ENOSPC goes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=12M", "hs-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
        pytest.skip("needs to mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError), (folder / "stranger.bin").open("wb", buffering=0) as handle:
        while True:
            handle.write(b"\0" * 4096)


def test_a_full_disk_does_not_keep_the_run_open_and_its_journal_is_kept(small_disk: Path) -> None:
    journal = begun(small_disk / "state")
    fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        journal.record("patch", "begun")
    report = restore.restore(str(journal.paths.state), "test")
    assert report.failures == []
    assert not journal.paths.lock.exists()
    assert not journal.paths.ballast.exists()
    assert json.loads((journal.folder / "journal.json").read_text())["closed"]["why"] == "test"


def test_a_disk_that_is_filled_again_at_once_does_neither(small_disk: Path) -> None:
    journal = begun(small_disk / "state")
    journal.paths.ballast.unlink()
    fill(small_disk)
    report = restore.restore(str(journal.paths.state), "test")
    assert report.failures == []
    assert not journal.paths.lock.exists()
    assert not journal.paths.journal.exists()
    assert json.loads((journal.folder / "journal.json").read_text())["run_id"] == journal.run_id


def test_no_room_for_the_ballast_means_no_run_and_no_lock(small_disk: Path) -> None:
    (small_disk / "stranger.bin").write_bytes(b"\0" * ((12 << 20) - BALLAST))
    with pytest.raises(HsError, match="there is no room for the journal"):
        begun(small_disk / "state")
    assert not (small_disk / "state/lock").exists()
    assert not (small_disk / "state/ballast").exists()


HANGS = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from sglang_hs import fsio, procs
with fsio.mutex(Path(sys.argv[1]), 0, json.dumps({"pid": os.getpid(), "start": procs.read(os.getpid()).start})):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_restore_that_hangs_past_its_steps_lease_is_ended_and_done_again(journal: Journal) -> None:
    words = [sys.executable, "-c", HANGS, str(journal.paths.restoring), str(REPO / "module_utils")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as hanging:
        assert hanging.stdout is not None
        assert hanging.stdout.readline() == "held\n"
        hanging.send_signal(signal.SIGSTOP)
        journal.record("restore", "begun")
        journal.record("restore: stop extraction", "begun", lease=60)
        state = str(journal.paths.state)
        seen = restore.guard_once(state)
        assert seen is not None
        assert (seen.lines, hanging.poll()) == ([], None), "within its lease it is left alone"
        journal.document["lease"]["until"] = time.time() - 1
        journal.save()
        seen = restore.guard_once(state)
        assert seen is not None
        assert "ended a restore that hung at 'restore: stop extraction'" in seen.lines[0]
        assert hanging.wait(10) == -signal.SIGKILL
    restore.guard_once(state)
    assert Journal.load(journal.paths) is None


def test_a_strangers_pid_in_the_restores_file_is_not_ended(journal: Journal) -> None:
    me = procs.read(os.getpid())
    assert me is not None
    with subprocess.Popen(["sleep", "600"]) as stranger:
        with fsio.mutex(journal.paths.restoring, 0, json.dumps({"pid": stranger.pid, "start": me.start - 1})):
            journal.record("restore", "begun")
            journal.document["lease"]["until"] = time.time() - 1
            journal.save()
            seen = restore.guard_once(str(journal.paths.state))
        assert seen is not None
        assert seen.lines == []
        assert stranger.poll() is None
        stranger.kill()


def test_a_living_run_of_another_operator_is_ended_only_when_that_is_said(journal: Journal) -> None:
    state = str(journal.paths.state)
    journal.record("launch", "begun", lease=600)
    with pytest.raises(HsError) as refused:
        restore.may_end(state, "you@desk", False)
    for piece in ("me@laptop", journal.run_id, "it is at: launch begun", "-e hs_take_over=true", "back by"):
        assert piece in str(refused.value)
    restore.may_end(state, "me@laptop", False)
    restore.may_end(state, "you@desk", True)


def test_an_orphaned_run_or_a_failed_restore_is_anybodys_to_end(journal: Journal) -> None:
    state = str(journal.paths.state)
    journal.record("stop", "done", lease=0.001)
    time.sleep(0.01)
    restore.may_end(state, "you@desk", False)
    journal.record("stop", "done", lease=600)
    journal.record("restore", "failed", lease=600)
    restore.may_end(state, "you@desk", False)


def test_the_lock_of_a_run_that_is_just_beginning_is_left_alone(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "BEGIN_PATIENCE", 0.2)
    journal.paths.journal.unlink()  # between the lock and the journal; whoever begins holds the mutex
    with fsio.mutex(journal.paths.mutex):
        report = restore.restore(str(journal.paths.state), "test")
    assert journal.paths.lock.exists()
    assert "a run is beginning right now; it is left alone" in report.lines
    assert not report.changed


def test_whoever_waits_for_a_restore_that_was_killed_waits_for_the_guards(journal: Journal) -> None:
    state = str(journal.paths.state)
    journal.record("restore", "begun", lease=60)  # and its program is gone
    alone = restore.outcome(state)
    assert (alone["finished"], alone["failed"]) == (True, True)
    assert "nobody begins it again; next, run playbooks/restore.yml" in alone["line"]
    me = procs.read(os.getpid())
    assert me is not None
    journal.document["guard"] = {"pid": me.pid, "start": me.start}  # this test plays the guard
    journal.save()
    waits = restore.outcome(state)
    assert (waits["finished"], waits["failed"]) == (False, False)
    assert "the guard begins it again in a moment" in waits["line"]
    assert restore.guard_once(state) is not None
    over = restore.outcome(state)
    assert (over["finished"], over["failed"], over["line"]) == (True, False, "the run is closed")


def test_a_restore_that_the_guard_does_not_take_on_in_time_has_failed(journal: Journal) -> None:
    me = procs.read(os.getpid())
    assert me is not None
    journal.document["guard"] = {"pid": me.pid, "start": me.start}
    journal.record("restore", "begun", lease=60)
    journal.document["lease"]["until"] = time.time() - restore.GUARD_PERIOD - 1
    journal.save()
    assert restore.outcome(str(journal.paths.state))["failed"]
