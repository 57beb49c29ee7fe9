"""The story: extract, restore, again; whatever fails on the way, production comes back and the exit code says the truth."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from local_host import CACHE, REPO, Host
from sglang_hs import fsio, procs, server


def samples_equal_hugging_face(host: Host) -> None:
    """Every saved state of every sample against Hugging Face's model on the same weights, in float32."""
    words = [
        str(CACHE / "engine/venv/bin/python"),
        "tests/engine/hf_reference.py",
        "--model",
        str(CACHE / "engine/model"),
        "--dataset",
        str(CACHE / "engine/dataset.jsonl"),
        "--output",
        str(host.samples),
        "--tolerance",
        "1e-4",
    ]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def count(host: Host) -> int:
    return len(list((host.samples / "hidden_states").glob("hs_*.safetensors")))


@pytest.fixture(autouse=True)
def fresh(host: Host) -> Iterator[None]:
    """Each of these tests begins with production serving and no samples, whatever the one before did."""
    host.forget_samples()
    assert not (host.state / "journal.json").exists()
    server.generate(host.url)
    yield
    if (host.state / "journal.json").exists():
        host.play("restore")


def test_extract_then_again_then_restore(host: Host) -> None:
    before = host.signature()
    # for every format: both final states, each compared below
    extra = {"hs_formats": ["native", "speculators-pt", "specforge", "modelopt"]}
    played = host.play("extract", extra=extra)
    assert played.code == 0, played.out
    host.assert_back(before)
    assert count(host) == 64
    samples_equal_hugging_face(host)
    shutil.copytree(host.samples, host.finished)

    pid = host.production().pid
    again = host.play("extract", extra=extra)
    assert again.code == 0, again.out
    assert again.recap("changed") == 0, again.out
    assert "nothing to do: all 64 samples are there; production is not touched" in " ".join(again.out.split())
    assert host.production().pid == pid

    restored = host.play("restore")
    assert restored.code == 0, restored.out
    assert restored.recap("changed") == 0
    assert host.production().pid == pid


def test_if_the_edit_fails_production_was_never_stopped(host: Host) -> None:
    before, pid = host.signature(), host.production().pid
    done = threading.Event()

    def forbid() -> None:
        # after preflight looked, before the edit is made: an administrator makes the file immutable
        while not host.step_begun("begin") and not done.is_set():
            time.sleep(0.01)
        subprocess.run(["chattr", "+i", str(host.source)], check=True)

    watcher = threading.Thread(target=forbid)
    watcher.start()
    try:
        played = host.play("extract")
    finally:
        done.set()
        watcher.join()
        subprocess.run(["chattr", "-i", str(host.source)], check=True)
    assert played.code == 2, played.out
    assert host.production().pid == pid
    assert "immutable" in " ".join(played.out.split())
    assert "TASK [stop_server : Stop production]" not in played.out
    host.assert_back(before)


def test_if_the_launch_fails_production_is_back_and_the_first_failure_is_the_last_word(host: Host) -> None:
    before = host.signature()
    played = host.play("extract", extra={"hs_extra_arguments": ["--dtype", "float33"]})
    assert played.code == 2, played.out
    host.assert_back(before)
    end = " ".join(played.out[played.out.rindex("Fail as the run failed") :].split())
    assert "Wait until the capture is attached and the server generates" in end
    assert "float33" in end
    assert count(host) == 0


def test_if_the_extraction_fails_production_is_back_and_the_next_run_goes_on(host: Host) -> None:
    before = host.signature()
    playing = host.begin("extract")
    host.wait_for("the extraction", lambda: host.step_begun("extract"))
    client = host.state / "runs" / host.journal()["run_id"] / "client.state.json"
    state = host.wait_for("its pid", lambda: (fsio.read_json(client) or {}).get("pid"))
    host.wait_for("the first samples", lambda: count(host) > 3)
    os.kill(state, signal.SIGKILL)
    assert playing.wait(timeout=400) == 2
    log = (host.folder / "play.log").read_text()
    assert "the client ended with status 137" in " ".join(log[log.rindex("Fail as the run failed") :].split())
    host.assert_back(before)
    kept = count(host)
    assert 0 < kept < 64
    first = {path: path.stat().st_mtime_ns for path in (host.samples / "hidden_states").iterdir()}

    played = host.play("extract")
    assert played.code == 0, played.out
    assert count(host) == 64
    # what was accepted was verified, not made again
    assert sum(path.stat().st_mtime_ns == stamp for path, stamp in first.items() if path.exists()) >= kept - 4
    samples_equal_hugging_face(host)
    host.assert_back(before)


def test_ctrl_c_then_extract_again_goes_on_with_the_run(host: Host) -> None:
    before = host.signature()
    playing = host.begin("extract")
    host.wait_for("the launch", lambda: host.step_begun("launch"))
    run_id = host.journal()["run_id"]
    os.killpg(playing.pid, signal.SIGINT)
    assert playing.wait(timeout=60) != 0
    assert host.journal()["run_id"] == run_id
    played = host.play("extract")
    assert played.code == 0, played.out
    assert f"run {run_id}" in " ".join(played.out.split())
    assert count(host) == 64
    host.assert_back(before)


def test_kill_9_of_the_controller_and_then_nothing_at_all(host: Host) -> None:
    before = host.signature()
    playing = host.begin("extract")
    host.wait_for("the extraction", lambda: host.step_begun("extract"))
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    host.wait_for("production back by itself", lambda: not (host.state / "journal.json").exists())
    host.assert_back(before)
    assert count(host) == 64


def test_restore_from_half_way_then_a_no_op(host: Host) -> None:
    before = host.signature()
    playing = host.begin("extract")
    host.wait_for("the launch", lambda: host.step_begun("launch"))
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    assert procs.port_free(host.port)
    restored = host.play("restore")
    assert restored.code == 0, restored.out
    assert restored.recap("changed") >= 1
    host.assert_back(before)
    again = host.play("restore")
    assert again.code == 0, again.out
    assert again.recap("changed") == 0


def test_production_that_is_down_on_purpose_stays_down(host: Host) -> None:
    assert host.play("extract").code == 0  # so that a run has seen how production is started
    host.forget_samples()
    before = host.signature()
    procs.end(procs.family(host.production().pid), 20)
    try:
        refused = host.play("extract")
        assert refused.code == 2
        assert "say so with hs_production_expected=stopped" in " ".join(refused.out.split())
        played = host.play("extract", extra={"hs_production_expected": "stopped"})
        assert played.code == 0, played.out
        assert count(host) == 64
        assert procs.port_free(host.port)
        host.assert_nothing_runs()
        assert not (host.state / "journal.json").exists()
    finally:
        host.start_production()
    # started by another hand: the same server, but for its environment
    assert host.signature()["source"] == before["source"]
