"""The course of a run in history.jsonl: its keys, its size however long the run is, and what a killed client leaves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
from sglang_hs_client.history import KEYS, History
from sglang_hs_client.progress import Progress


def mark(at: float, **more: Any) -> Dict[str, Any]:
    return {**dict.fromkeys(KEYS, 0), "at": at, "phase": "extract", **more}


def read(folder: Path) -> List[Dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def test_a_line_every_five_seconds_at_each_change_of_phase_and_at_the_end(tmp_path: Path) -> None:
    history = History(tmp_path)
    for second in range(1000, 1021):
        history.add(mark(second, phase="canary" if second < 1012 else "extract", done=second))
    history.add(mark(1021, phase="extract"), last=True)
    assert [line["at"] for line in read(tmp_path)] == [1000, 1005, 1010, 1012, 1017, 1021]
    assert all(tuple(line) == KEYS for line in read(tmp_path))


@pytest.mark.parametrize("seconds", [3000, 40000])
def test_it_stays_small_and_covers_the_whole_run(tmp_path: Path, seconds: int) -> None:
    history = History(tmp_path, period=1.0, most=200)
    for second in range(seconds):
        history.add(mark(1e9 + second, done=second))
        if second % 500 == 0:
            assert len(read(tmp_path)) <= 200
    history.add(mark(1e9 + seconds, done=seconds), last=True)
    found = read(tmp_path)
    assert 90 < len(found) <= 201
    assert (found[0]["done"], found[-1]["done"]) == (0, seconds)
    times = [line["at"] for line in found]
    assert times == sorted(times)
    assert max(b - a for a, b in zip(times, times[1:])) <= 2 * history.period


def test_a_client_that_is_started_again_goes_on_and_leaves_out_a_torn_line(tmp_path: Path) -> None:
    first = History(tmp_path, period=1.0, most=100)
    for second in range(150):
        first.add(mark(1e9 + second, done=second))
    kept = len(read(tmp_path))
    with open(tmp_path / "history.jsonl", "a") as handle:
        handle.write('{"at": 17')  # kill -9 in the middle of it
    again = History(tmp_path, period=1.0, most=100)
    assert again.period == first.period == 2.0
    again.add(mark(1e9 + 200, done=200))
    again.add(mark(1e9 + 202, done=202))
    found = read(tmp_path)
    assert len(found) == kept + 2 and [line["done"] for line in found[-2:]] == [200, 202]


def test_progress_tells_the_free_bytes_and_ends_the_history(tmp_path: Path) -> None:
    counts = {"done": 3, "failed": 1, "quarantined": 2, "tokens_done": 40, "bytes_done": 500, "total": 9}
    progress = Progress(tmp_path, lambda: counts, str(tmp_path), str(tmp_path / "not there yet"))
    progress.write()
    progress.write()
    progress.stop()
    told = json.loads((tmp_path / "progress.json").read_text())
    free = os.statvfs(tmp_path)
    assert abs(told["dump_free"] - free.f_bavail * free.f_frsize) < 1 << 30 and told["output_free"] is None
    first, last = read(tmp_path)
    assert last == {
        "at": told["updated"],
        "phase": "canary",
        "done": 3,
        "failed": 1,
        "quarantined": 2,
        "tokens": 40,
        "bytes": 500,
        "dump_free": told["dump_free"],
        "output_free": None,
    }
    assert first["at"] < last["at"]
