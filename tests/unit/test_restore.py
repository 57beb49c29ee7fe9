"""When the guard restores, and what a restore does when a step of it fails."""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import fsio, procs, restore, steps, watching
from sglang_hs.journal import Journal, Paths, boot_id

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
GONE = {"pid": 2**22 + 1, "start": 1, "supervisor": 2**22 + 2, "supervisor_start": 1, "asked": 1.0}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    paths = Paths(str(tmp_path / "state"))
    paths.make()
    record = {
        "argv": ["x"],
        "expected": "stopped",
        "port": 1,
        "url": "http://127.0.0.1:1",
        "api_key": "",
        "kind": "process",
    }
    return Journal.open(paths, "me@laptop", VIEW, {}, record)


def test_nothing_is_due_while_steps_are_in_time(journal: Journal) -> None:
    journal.record("stop", "begun", lease=60)
    assert restore.due(journal, time.time()) is None


def test_a_controller_that_went_away_between_steps(journal: Journal) -> None:
    journal.record("stop", "done", lease=60)
    assert restore.due(journal, time.time() + 61) == "nobody went on after step 'stop'"


def test_the_window_closes_even_on_a_running_extraction(journal: Journal) -> None:
    assert restore.due(journal, journal.document["deadline"] + 1) == "the window closed"


def test_the_window_leaves_production_the_time_to_load(journal: Journal) -> None:
    end = journal.document["deadline"]
    journal.document["steps"] += [
        {"step": "launch", "state": "begun", "at": end - 3000},
        {"step": "launch", "state": "done", "at": end - 2200},
    ]
    assert restore.due(journal, end - 1001) != "the window closed"
    assert restore.due(journal, end - 999) == "the window closed"


def test_a_reboot(journal: Journal) -> None:
    journal.document["boot_id"] = "another"
    assert boot_id() != "another"
    assert restore.due(journal, time.time()) == "the host was rebooted during the run"


def test_a_dead_extraction_server(journal: Journal) -> None:
    journal.record("launch", "begun", lease=600)
    fsio.write_json(journal.folder / "server.state.json", dict(GONE, ended=time.time() - 30, code=137))
    assert restore.due(journal, time.time()) == "the extraction server ended with status 137"


def test_an_extraction_that_ended_with_nobody_watching(journal: Journal) -> None:
    journal.record("extract", "begun")
    fsio.write_json(journal.folder / "client.state.json", dict(GONE, ended=time.time() - 5, code=0))
    assert restore.due(journal, time.time()) is None, "the controller is given its chance"
    assert restore.due(journal, time.time() + 20) == "the extraction ended and nobody brought production back"


def test_whoever_watches_a_long_extraction_is_given_a_chance_at_its_end(journal: Journal) -> None:
    """The lease that began with the client has run out long ago; that is not what counts."""
    journal.record("extract", "begun", lease=0.001)
    fsio.write_json(journal.folder / "client.state.json", dict(GONE, ended=time.time() - 1, code=0))
    assert restore.due(journal, time.time()) is None


def test_a_restore_that_was_killed_is_taken_up(journal: Journal) -> None:
    journal.record("restore", "begun")
    assert restore.due(journal, time.time()) == "a restore did not finish"


def test_a_restore_that_failed_is_tried_again_later_for_as_long_as_it_takes(journal: Journal) -> None:
    now = time.time()
    journal.record("restore", "failed")
    journal.document.update(restore_tries=1, retry_at=now + 60)
    assert restore.due(journal, now) is None
    assert restore.due(journal, now + 61) == "a restore did not finish"
    journal.document["restore_tries"] = 100
    assert restore.due(journal, now + 61) == "a restore did not finish"


def test_a_failing_step_does_not_skip_the_others(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def broken(*_: Any) -> None:
        raise OSError("no GPU answers")

    monkeypatch.setattr(restore, "_free_gpus", broken)
    for name in ("_restore_source", "_start_production", "_check_production"):
        monkeypatch.setattr(restore, name, lambda *_, name=name: ran.append(name))
    report = restore.restore(str(journal.paths.state), "test")
    assert ran == ["_restore_source", "_start_production", "_check_production"]
    assert report.failures == ["free GPUs: OSError: no GPU answers"]
    kept = Journal.load(journal.paths)
    assert kept is not None, "a run whose restore failed stays open"
    assert kept.last("restore") == "failed"
    assert journal.paths.lock.exists()


def test_a_restore_of_another_run_touches_nothing(journal: Journal) -> None:
    report = restore.restore(str(journal.paths.state), "test", "none")
    assert not report.changed
    assert "is held by me@laptop" in " ".join(report.lines)
    assert Journal.load(journal.paths) is not None


def test_a_restore_closes_the_run_and_a_second_one_is_a_no_op(journal: Journal) -> None:
    report = restore.restore(str(journal.paths.state), "test")
    assert report.failures == []
    assert report.changed
    assert not journal.paths.lock.exists()
    again = restore.restore(str(journal.paths.state), "test")
    assert (again.changed, again.failures) == (False, [])


def test_a_host_that_never_had_a_run_is_left_without_a_trace(tmp_path: Path) -> None:
    report = restore.restore(str(tmp_path / "never"), "test")
    assert (report.changed, report.failures) == (False, [])
    assert not (tmp_path / "never").exists()


def test_a_lock_without_a_journal_is_taken_away(journal: Journal) -> None:
    journal.paths.journal.unlink()
    report = restore.restore(str(journal.paths.state), "test")
    assert report.changed
    assert not journal.paths.lock.exists()


def test_a_stranger_on_productions_port_is_told_long_before_production_s_own_time_is_up(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "STRANGER_PATIENCE", 0.1)
    journal.document["settings"]["production_timeout"] = 30
    journal.save()

    class Answers(BaseHTTPRequestHandler):  # but no POST
        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        record = {**steps.production_record(journal.paths), "expected": "running", "port": port}
        fsio.write_json(
            journal.paths.production, {**record, "url": f"http://127.0.0.1:{port}", "pid": 2**22 + 1, "start": 1}
        )
        report = restore.restore(str(journal.paths.state), "test")
        server.shutdown()
    start, check = report.failures
    assert start.startswith("start production: production's port") and f"held by pid {os.getpid()}" in start
    assert check.startswith("check production: production does not answer: no generation within 0 s")


def test_the_dump_folder_goes_but_strangers_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    steps.dump_folder(folder, 0, 0)
    (folder / "done" / "x.safetensors").write_bytes(b"x")
    (folder / ".client.lock").touch()
    (folder / "every_rank").touch()
    assert steps.clear_dumps(folder)
    assert not folder.exists()
    steps.dump_folder(folder, 0, 0)
    (folder / "thesis.txt").write_text("years of work")
    assert steps.clear_dumps(folder)
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
    assert not steps.clear_dumps(folder), "a folder that is not ours is left alone"


def test_a_server_that_generates_without_the_capture_is_refused_at_once(journal: Journal, tmp_path: Path) -> None:
    class Generates(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = json.dumps({"output_ids": [1], "meta_info": {"completion_tokens": 8}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    me = procs.read(os.getpid())
    assert me is not None
    alive = {"pid": me.pid, "start": me.start, "supervisor": me.pid, "supervisor_start": me.start, "asked": 1.0}
    fsio.write_json(journal.folder / "server.state.json", alive)
    (journal.folder / "server.log").write_text("Load weight end.\n")
    dumps = tmp_path / "dumps"
    steps.dump_folder(dumps, os.getuid(), os.getgid())
    with ThreadingHTTPServer(("127.0.0.1", 0), Generates) as server:
        model_file = tmp_path / "deepseek_v2.py"
        model_file.write_text("# the next release\n")
        engine = {"model_file": str(model_file)}
        settings = {"tensor_parallel": 1, "dump_dir": str(dumps), "extraction_port": 1, "engine": engine}
        journal.document["settings"].update(settings, no_touch=True)
        found = watching.ready(journal)
        assert (found["finished"], found["failed"], found["phase"]) == (False, False, "memory pool 0")
        assert found["line"].startswith("launch: memory pool | capture attached on 0 of 1 ranks | ")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        journal.document["settings"]["extraction_port"] = server.server_address[1]
        found = watching.ready(journal)
        journal.document["settings"]["no_touch"] = False
        upgraded = watching.ready(journal)
        server.shutdown()
    assert (found["finished"], found["failed"]) == (True, True)
    assert (
        "generates, but the capture is attached on 0 of its 1 ranks: the model that it serves is not" in found["line"]
    )
    assert f"{model_file} is no longer as it was edited in this run (pristine); was the package up" in upgraded["line"]
