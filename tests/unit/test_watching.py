"""The line that tells how a run is doing, and when a launch is not waited for any longer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import fsio, procs, turns, watching
from sglang_hs.errors import HsError
from sglang_hs.journal import Journal, Paths

MEASURED: dict[str, Any] = {
    "phase": "extract",
    "total": 10000,
    "done": 1234,
    "failed": 0,
    "quarantined": 0,
    "tokens_done": 2134567,
    "tokens_per_s": 4410.2,
    "bytes_per_s": 252.9e6,
    "eta_s": 3730,
    "updated": 1000.0,
    "dump_free": 31.2e9,
    "output_free": 812e9,
}


def line(
    now: float = 1000.0, deadline: float = 1000.0 + 5 * 3600, stops_at: float | None = None, **changes: Any
) -> str:
    return watching.progress_line({**MEASURED, **changes}, now, deadline, stops_at)


def test_all_that_an_operator_asks_for_is_in_the_line_the_most_important_first() -> None:
    assert line() == (
        "1,234/10,000 samples (12 %) | 2.13M tokens | 4,410 tokens/s | 0.25 GB/s | ETA 1:02:10 | window 5:00:00 | "
        "/dev/shm 31.2 GB | disk 812.0 GB free | 0 errors | 0 in quarantine"
    )


def test_errors_come_to_the_front_and_an_eta_past_the_window_says_so() -> None:
    assert line(failed=2, quarantined=3).startswith("1,234/10,000 samples (12 %) | 2 errors | 3 in quarantine | ")
    assert "ETA 1:02:10, after the window | " in line(stops_at=1000.0 + 3600)
    assert "ETA 1:02:10 | " in line(stops_at=1000.0 + 2 * 3600)


def test_other_phases_and_a_client_that_fell_silent() -> None:
    assert line(phase="canary", message="3 of 4 sequences").startswith("canary: 3 of 4 sequences | window 5:00:00 | ")
    assert "| describing the output |" in line(phase="finish", message="describing the output")
    assert "tokens/s" not in line(phase="finish")
    assert line(now=1090.0).startswith("the client has written nothing for 1:30 | 1,234/10,000")
    first = line(started=970.0, tokens_per_s=0.0, bytes_per_s=0.0, eta_s=None)
    assert "tokens | window" in first and "tokens/s" not in first, "no rate before there is one"
    assert "| 0 tokens/s |" in line(started=900.0, tokens_per_s=0.0, bytes_per_s=0.0, eta_s=None)
    assert watching.progress_line({}, 0.0, 60.0) == "extract: the client starts | window 1:00"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (59.9, "59 s"), (60, "1:00"), (3599, "59:59"), (3661, "1:01:01")]
)
def test_a_clock(seconds: float, text: str) -> None:
    assert watching.clock(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (9999, "9,999"), (12345, "12.3k"), (4.56e6, "4.56M"), (1.7e10, "17G")]
)
def test_a_count(number: float, text: str) -> None:
    assert watching.count(number) == text


@pytest.fixture
def launched(tmp_path: Path) -> Journal:
    """A launch at work, whose server (this process) lives."""
    paths = Paths(str(tmp_path / "state"))
    paths.make()
    settings = {
        "window_s": 3600,
        "launch_timeout": 300,
        "tensor_parallel": 1,
        "extraction_port": 1,
        "dump_dir": str(tmp_path / "dumps"),
    }
    record = {
        "argv": ["x"],
        "expected": "stopped",
        "port": 1,
        "url": "http://127.0.0.1:1",
        "api_key": "",
        "kind": "process",
    }
    journal = Journal.open(paths, "me@laptop", {"settings": settings, "flags": {}}, {}, record)
    journal.record("launch", "begun")
    me = procs.read(os.getpid())
    assert me is not None
    state = {"pid": me.pid, "start": me.start, "supervisor": me.pid, "supervisor_start": me.start, "asked": 1.0}
    fsio.write_json(journal.folder / "server.state.json", state)
    return journal


def asked(journal: Journal) -> dict[str, Any]:
    return watching.progress(str(journal.paths.state), journal.run_id, "launch")


def test_a_server_that_was_denied_its_port_and_hangs_is_not_waited_for(launched: Journal) -> None:
    logs = Path(__file__).parent / "data/server_logs"
    log = launched.folder / "server.log"
    log.write_bytes((logs / "0.5.23-port-taken.log").read_bytes())
    assert not asked(launched)["finished"], "it may still end by itself"
    long_ago = time.time() - 60
    os.utime(log, (long_ago, long_ago))
    found = asked(launched)
    assert (found["finished"], found["failed"]) == (True, True)
    assert found["line"].startswith(
        "the extraction server failed and does not end: ERROR:    [Errno 98] error while attempting to bind"
    )
    reread = Journal.load(launched.paths)
    assert reread is not None and reread.last("launch") == "failed"
    # one that only loads silently for long is waited for
    launched.record("launch", "begun")
    log.write_text("server_args=x\nLoad weight begin.\n")
    os.utime(log, (long_ago, long_ago))
    assert not asked(launched)["finished"]


def test_a_launch_that_takes_too_long_says_where_it_was(launched: Journal) -> None:
    (launched.folder / "server.log").write_text(
        "server_args=x\nLoad weight begin.\nLoading safetensors checkpoint shards:  37% Completed | 23/62 [02:11<03:42,  5.71s/it]\n"
    )
    launched.document["steps"][-1]["at"] -= 301
    launched.save()
    found = asked(launched)
    assert (found["finished"], found["failed"]) == (True, True)
    assert found["line"].startswith(
        "not ready after 300 s (hs_launch_timeout); it was at: launch: loading weights: 37 % (shard 23 of 62) | "
    )


def test_a_data_set_that_is_through_is_no_failure_because_the_guard_was_faster(launched: Journal) -> None:
    """Whoever watches was late: the guard brings production back already, then it has."""
    state = str(launched.paths.state)
    launched.record("extract", "begun")
    fsio.write_json(launched.folder / "result.json", {"outcome": "complete", "message": "64 of 64 samples"})
    launched.record("restore", "begun", "guard: the extraction ended and nobody brought production back")
    with fsio.mutex(launched.paths.mutex):
        found = watching.progress(state, launched.run_id, "extract")
    assert (found["finished"], found["failed"], found["line"]) == (True, False, "64 of 64 samples")
    launched.close("restored", "guard")
    assert watching.progress(state, launched.run_id, "extract")["failed"] is False


def test_a_step_that_comes_after_the_windows_end_says_that(launched: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN", 0.2)
    state = str(launched.paths.state)
    launched.record("restore", "begun", "guard: the window closed")
    with pytest.raises(HsError, match=r"has begun \(guard: the window closed\)"):
        watching.progress(state, launched.run_id, "extract")
    with fsio.mutex(launched.paths.mutex), pytest.raises(HsError, match=r"has begun \(guard: the window closed\)"):
        turns.note(state, launched.run_id, "patch", "begun", "", 0)


def test_a_remote_that_holds_the_run_back_or_fails_is_told_first() -> None:
    moving = {
        "moved": 1200,
        "bytes_waiting": 34e9,
        "holding_since": None,
        "failing_since": None,
        "retry_at": None,
        "error": "",
    }
    assert " | 1,200 moved, 34.0 GB to go | window " in line(moving=moving)
    held = line(
        moving=dict(moving, holding_since=940.0, failing_since=880.0, retry_at=1012.0, error="rclone copy: no route")
    )
    assert held.startswith(
        "WAITING FOR THE REMOTE for 1:00 | 1,200 moved, 34.0 GB to go | "
        "the remote fails since 2:00 (rclone copy: no route); tried again in 12 s | 1,234/10,000 samples"
    )
