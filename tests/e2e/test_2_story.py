"""The story: extract, restore, again; whatever fails on the way, production comes back and the exit code says the truth."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from local_host import CACHE, FORMATS, REPO, Host
from sglang_hs import fsio, procs, server
from sglang_hs.journal import Paths


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


def a_log_tells_of_every_phase_and_is_no_wall(out: str) -> None:
    lines = [line for line in out.splitlines() if line.startswith("  localhost: ")]
    for phase in ("launch: starting | capture attached on 0 of 1 ranks | ", "restore: "):
        assert [line for line in lines if phase in line], (phase, lines)
    assert [line for line in lines if "canary: " in line or "/64 samples" in line or "the client starts" in line], lines
    # a phase each, and one each half a minute; how long the phases take is this machine's affair
    assert len(lines) < 60, lines
    assert "\x1b" not in out


def the_history_covers_the_run(host: Host) -> None:
    newest = max((host.state / "runs").glob("*/history.jsonl"), key=os.path.getmtime)
    found = [json.loads(line) for line in newest.read_text().splitlines()]
    keys = {"at", "phase", "done", "failed", "quarantined", "tokens", "bytes", "dump_free", "output_free"}
    assert all(set(line) == keys for line in found)
    assert found[0]["done"] < found[-1]["done"] == 64 and found[-1]["phase"] == "done"
    assert found[-1]["bytes"] > 0 and found[-1]["output_free"] > 0 and found[1]["dump_free"] > 0


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
    extra = {"hs_formats": FORMATS}
    played = host.play("extract", extra=extra)
    assert played.code == 0, played.out
    host.assert_back(before)
    assert count(host) == 64
    samples_equal_hugging_face(host)
    engine_file = json.loads((host.samples / "manifest.json").read_text())["provenance"]["engine_file"]
    assert (engine_file["state"], engine_file["sha256_pristine"]) == ("patched", before["source"])
    assert engine_file["sha256"] != before["source"]
    a_log_tells_of_every_phase_and_is_no_wall(played.out)
    the_history_covers_the_run(host)
    shutil.copytree(host.samples, host.finished)
    host.keep_page()

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


def test_no_touch_edits_nothing_and_gives_the_same_states(host: Host) -> None:
    # production itself names a package there (sgl_cpu_ext), without which this engine cannot prefill: it is chained
    before, inode = host.signature(), host.source.stat()
    played = host.play("extract", extra={"hs_no_touch": True})
    assert played.code == 0, played.out
    assert (
        "edit: none; the capture comes in as the package sglang_hs_models, which imports production's own sgl_cpu_ext"
        in " ".join(played.out.split())
    )
    host.assert_back(before)
    after = host.source.stat()
    assert (after.st_ino, after.st_ctime_ns) == (inode.st_ino, inode.st_ctime_ns)
    made_by = json.loads((host.samples / "manifest.json").read_text())["provenance"]
    assert (made_by["way_in"], made_by["engine_file"]["sha256"]) == ("package", before["source"])
    assert count(host) == 64
    samples_equal_hugging_face(host)


def test_prompts_that_share_a_forward_give_the_same_states(host: Host) -> None:
    before = host.signature()
    played = host.play("extract", extra={"hs_tokens_per_forward": 4096})
    assert played.code == 0, played.out
    host.assert_back(before)
    result = json.loads(max((host.state / "runs").glob("*/result.json"), key=os.path.getmtime).read_text())
    assert result["canary"]["together"] > 1
    assert result["counts"]["forwards"] < 64 / 2
    samples_equal_hugging_face(host)


def test_a_run_that_its_window_cuts_has_its_own_status_and_production_is_back_in_time(host: Host) -> None:
    before = host.signature()
    data = host.folder / "long.jsonl"
    data.write_text(
        "".join(json.dumps({"input_ids": [7 + row % 500, 8 + row // 500, *range(9, 25)]}) + "\n" for row in range(5000))
    )
    played = host.play("extract", extra={"hs_dataset": str(data), "hs_window": "100s", "hs_stop_timeout": 10})
    assert played.code == 75, played.out
    flat = " ".join(played.out.split())
    assert f"the window closed before the data set was through: {count(host)} of 5000 samples" in flat
    assert "Next: start playbooks/extract.yml again" in flat
    assert "tokens/s, before the run" in flat
    host.assert_back(before)
    journal = json.loads(max((host.state / "runs").glob("*/journal.json"), key=os.path.getmtime).read_text())
    assert journal["closed"]["at"] < journal["deadline"]


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
    # what the server itself said last, not that its process ended
    assert "error: argument --dtype: invalid choice: 'float33'" in end
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
    status = host.play("status")
    assert (status.code, status.recap("changed")) == (0, 0), status.out
    assert f"run {run_id} of " in status.out and "production is back by" in " ".join(status.out.split())
    assert f"edited: {host.source}" in " ".join(status.out.split())
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
    seen = procs.adoption(host.production())
    procs.end(procs.family(host.production().pid), 20)
    try:
        refused = host.play("extract")
        assert refused.code == 2
        assert "say so with hs_production_expected=stopped" in " ".join(refused.out.split())
        # where no run has seen it, the operator says how it is started, and what its Python needs
        paths = Paths(str(host.state))
        kept = {path: path.read_bytes() for path in (paths.production, paths.flags)}
        for path in kept:
            path.unlink()
        unseen = {"hs_production_expected": "stopped", "hs_production_argv": seen["argv"]}
        needed = {"hs_extraction_env": {"PYTHONPATH": seen["env"]["PYTHONPATH"]}}
        told = host.play("extract", "--check", extra={**unseen, **needed})
        assert told.code == 0, told.out
        for path, data in kept.items():
            path.write_bytes(data)
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
