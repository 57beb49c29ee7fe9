"""How a host stands: each situation with what to do in it, who watches over the run, and the same as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import __main__ as program
from sglang_hs import fsio, procs, production, status
from sglang_hs.journal import Journal, Paths
from source_edit_helpers import Place, as_nobody

LIBRARY = str(Path(status.__file__).parents[1])


@pytest.fixture(autouse=True)
def no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(production, "has_units", lambda: False)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place(tmp_path)
    place.backup = tmp_path / "state/backup"
    return place


def record(place: Place, expected: str = "running") -> dict[str, Any]:
    log = place.root / "production.log"
    return {
        "kind": "process",
        "expected": expected,
        "pid": 2**22 + 5,
        "start": 1,
        "port": 1,
        "url": "http://127.0.0.1:1",
        "api_key": "",
        "argv": ["x"],
        "unit": None,
        "start_command": [],
        "stdout": str(log),
    }


@pytest.fixture
def journal(place: Place) -> Journal:
    """An open run with its guard (this process) on watch."""
    paths = Paths(str(place.root / "state"))
    paths.make()
    settings = {
        "window_s": 3600,
        "stop_timeout": 1,
        "launch_timeout": 300,
        "tensor_parallel": 2,
        "dump_dir": str(place.root / "dumps"),
        "engine": {"model_file": str(place.file)},
    }
    view = {"settings": settings, "flags": {}}
    journal = Journal.open(paths, "me@laptop", view, {}, record(place))
    me = procs.read(os.getpid())
    assert me is not None
    journal.document["guard"] = {"pid": me.pid, "start": me.start}
    journal.record("begin", "done")
    return journal


def look(place: Place) -> tuple[dict[str, Any], str]:
    found = status.look(str(place.root / "state"))
    assert json.loads(json.dumps(found)) == found, "it must be JSON as it is"
    return found, "\n".join(status.lines(found))


def alive(journal: Journal, *jobs: str) -> None:
    me = procs.read(os.getpid())
    assert me is not None
    state = {"pid": me.pid, "start": me.start, "supervisor": me.pid, "supervisor_start": me.start, "asked": 1.0}
    for job in jobs:
        fsio.write_json(journal.folder / f"{job}.state.json", state)


def test_a_host_that_never_saw_a_run(place: Place) -> None:
    found, text = look(place)
    assert (found["situation"], found["open"]) == ("idle", False)
    assert text == "no run is open\nengine source: as it was\nnext: nothing: no run is open"


def test_a_run_at_work_says_who_where_until_when_and_how_to_watch(place: Place, journal: Journal) -> None:
    place.present()
    journal.record("stop", "begun")
    journal.record("stop", "done")
    journal.record("launch", "begun", lease=420)
    alive(journal, "server")
    (journal.folder / "server.log").write_text(
        "server_args=x\nLoad weight begin.\nMulti-thread loading shards:  37% Completed | 23/62 [02:11<03:42,  5.71s/it]\n"
    )
    found, text = look(place)
    assert found["situation"] == "running"
    assert f"run {journal.run_id} of me@laptop, begun " in text
    assert "step: launch begun at " in text and "production is back by " in text
    assert "guard: on watch (pid " in text and "or if nobody goes on after step 'launch' by " in text
    assert "progress: launch: loading weights: 37 % (shard 23 of 62) | capture attached on 0 of 2 ranks | " in text
    assert "- stopped by this run" in text
    assert f"engine source: edited: {place.file}" in text
    assert "next: playbooks/extract.yml again goes on watching (as me@laptop)" in text
    assert "ATTENTION" not in text


def test_the_progress_is_the_line_of_the_watching(place: Place, journal: Journal) -> None:
    journal.record("extract", "begun")
    alive(journal, "server", "client")
    progress = {
        "phase": "extract",
        "total": 10,
        "done": 4,
        "tokens_done": 1234,
        "quarantined": 1,
        "eta_s": 61,
        "updated": time.time(),
    }
    fsio.write_json(journal.folder / "progress.json", progress)
    _, text = look(place)
    assert (
        "progress: 4/10 samples (40 %) | 0 errors | 1 in quarantine | 1,234 tokens | " in text
        and "ETA 1:01 | window 59:" in text
    )


@pytest.mark.parametrize("how", ["gone", "never"])
def test_a_run_without_a_guard_is_said_loudly(place: Place, journal: Journal, how: str) -> None:
    if how == "gone":
        child = subprocess.Popen(["true"])
        journal.document["guard"] = {"pid": child.pid, "start": 1}
        child.wait()
    else:
        del journal.document["guard"]
    journal.save()
    found, text = look(place)
    assert found["situation"] == "unguarded" and not found["guard"]["alive"]
    assert "ATTENTION: NO GUARD IS ON WATCH" in text and "guard: on watch" not in text
    assert "run playbooks/extract.yml again, which sets the guard on watch" in found["next"]


def test_a_timer_that_is_not_active_is_no_guard(
    place: Place, journal: Journal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(production, "has_units", lambda: True)
    del journal.document["guard"]
    journal.save()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for state, living in (("active", True), ("inactive", False)):
        systemctl = tmp_path / "bin/systemctl"
        systemctl.write_text(f"#!/bin/sh\necho {state}\n")
        systemctl.chmod(0o755)
        found, text = look(place)
        assert (found["guard"]["alive"], found["guard"]["kind"]) == (living, "timer")
        assert ("NO GUARD IS ON WATCH (sglang-hs-guard.timer is inactive)" in text) == (not living)


def test_a_journal_from_another_boot(place: Place, journal: Journal) -> None:
    journal.document["boot_id"] = "another"
    journal.save()
    found, text = look(place)
    assert found["other_boot"] and "ATTENTION: this run is from before the host's last boot" in text
    assert found["next"].startswith("wait: the guard restores in a moment")
    journal.document.pop("guard")
    journal.save()
    assert look(place)[0]["next"].startswith("run playbooks/restore.yml")


def test_a_restore_at_work_is_waited_for_and_looking_does_not_hinder_it(place: Place, journal: Journal) -> None:
    journal.record("restore", "begun", lease=7200)
    journal.record("restore: check production", "begun", lease=7200)
    lock = journal.paths.state / ".restore"
    code = "import sys; from pathlib import Path; from sglang_hs import fsio\nwith fsio.mutex(Path(sys.argv[1])): print('held', flush=True); input()"
    env = {**os.environ, "PYTHONPATH": LIBRARY}
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdin is not None and child.stdout.readline() == "held\n"
    found, text = look(place)
    child.stdin.close()
    child.wait()
    assert found["situation"] == "restoring" and "next: wait: the restore is at work" in text
    assert look(place)[0]["situation"] != "restoring", "its holder is gone"


def test_a_restore_that_failed_says_what_to_read_and_who_tries_again(place: Place, journal: Journal) -> None:
    (journal.folder / "production.log").write_text("ValueError: no\n")
    journal.document.update(restore_tries=2, retry_at=time.time() + 60)
    journal.record("restore", "failed", "check production: it does not answer", lease=60)
    found, text = look(place)
    assert found["situation"] == "restore failed"
    assert "ATTENTION: the restore failed 2 times: check production: it does not answer" in text
    assert str(journal.folder / "production.log") in found["next"] and "(tries so far: 2)" in found["next"]
    assert "does not answer: http://127.0.0.1:1/generate" in text


def test_idle_tells_of_the_last_run(place: Place, journal: Journal) -> None:
    fsio.write_json(
        journal.folder / "result.json", {"outcome": "window", "message": "the window closed: 40 of 64 samples"}
    )
    fsio.write_json(journal.paths.production, record(place, "stopped"))
    journal.close("restored", "the run failed")
    found, text = look(place)
    assert (found["situation"], found["last"]["run_id"]) == ("idle", journal.run_id)
    assert f"last run: {journal.run_id} of me@laptop, closed " in text
    assert "(the run failed): the window closed: 40 of 64 samples" in text


def idle(place: Place) -> None:
    for name in ("journal.json", "lock"):
        (place.root / "state" / name).unlink()


def test_idle_but_the_source_is_edited(place: Place, journal: Journal) -> None:
    place.present()
    idle(place)
    found, text = look(place)
    assert (found["situation"], found["edited"]) == ("left over", [str(place.file)])
    assert "next: run playbooks/restore.yml (or " in text and "still edited" in text
    place.undo()
    assert look(place)[0]["edited"] == []


def test_idle_with_a_lock_left(place: Place, journal: Journal) -> None:
    (place.root / "state/journal.json").unlink()
    found, text = look(place)
    assert found["situation"] == "left over" and "lock: left by a run that died" in text


def test_idle_and_production_silent(place: Place, journal: Journal) -> None:
    idle(place)
    found, text = look(place)
    assert found["situation"] == "production silent"
    assert str(place.root / "production.log") in found["next"] and "nothing here stopped production" in text
    fsio.write_json(journal.paths.production, record(place, "stopped"))
    assert look(place)[0]["situation"] == "idle"


def test_the_program_says_the_same_as_lines_and_as_json(place: Place, journal: Journal) -> None:
    env = {**os.environ, "PYTHONPATH": LIBRARY}

    def hs(*words: str) -> str:
        command = [sys.executable, "-m", "sglang_hs", "status", "--state-dir", str(journal.paths.state), *words]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout

    told = json.loads(hs("--json"))
    assert (told["run_id"], told["situation"]) == (journal.run_id, "running")
    assert f"run {journal.run_id} of me@laptop" in hs()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_state_folder_that_may_not_be_read_is_one_message() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o711)
        paths = Paths(f"{folder}/state")
        paths.make()
        fsio.write_json(paths.journal, {})

        def work() -> str:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                code = program.main(["status", "--state-dir", str(paths.state)])
            return f"{code} {said.getvalue()}"

        told = as_nobody(work)
    assert told.startswith("1 ") and "Permission denied" in told
    assert "Next: run it as the user that the run belongs to, or as root (sudo)" in told
