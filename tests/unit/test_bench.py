"""The frame of the measurements: what counts as met, what says nothing, what a report keeps, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import frame, report  # noqa: E402 - it lies beside, not in a package
from bench.frame import Goal, Place, judge, rounds  # noqa: E402

PLACE = Place("key", Path(), Path())


@pytest.mark.parametrize(
    ("values", "goal", "met"),
    [
        ([1.0, 1.01, 1.02], Goal("at most", 1.05), True),
        ([1.0, 1.01, 1.02], Goal("at least", 1.05), False),
        ([0.5, 1.0, 1.5, 2.0], Goal("at most", 1.3), None),  # wide, and the goal inside
        ([1.0, 2.0, 3.0, 4.0], Goal("at most", 10.0), True),  # wide, and the goal far off
        ([1.02, 1.04, 1.06, 1.08], Goal("at most", 1.055), True),  # narrow: the median decides
        ([2.0], Goal("at least", 2.0), True),
    ],
)
def test_a_goal_is_met_missed_or_not_to_be_told(values: list[float], goal: Goal, met: bool | None) -> None:
    assert judge(values, goal)[2] is met


def test_a_ratio_is_that_of_the_rounds_not_of_the_medians() -> None:
    figure = PLACE.ratio("key", "s", [1.0, 10.0, 4.0], [2.0, 10.0, 8.0], Goal("at most", 0.6), "other")
    assert (figure.ratio, figure.median, figure.value, figure.other) == (0.5, 0.5, 4.0, 8.0)
    again = PLACE.ratio("key", "s", [1.0, 10.0, 4.0], [2.0, 10.0, 8.0], Goal("at least", 2), "other", inverse=True)
    assert (again.ratio, again.command) == (2.0, "make bench ONLY=key")
    with pytest.raises(ValueError):
        PLACE.ratio("key", "s", [1.0], [1.0, 2.0], Goal("at most", 1), "other")


def test_rounds_take_turns_and_the_first_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame.Watch, "others", lambda self: 0.0)
    calls: list[str] = []

    def side(name: str) -> Any:
        def call() -> float:
            calls.append(name)
            return float(len(calls))

        return call

    found = rounds(2, side("a"), side("b"))
    assert "".join(calls) == "baabba"
    assert found == [[3.0, 6.0], [4.0, 5.0]]


def test_a_disturbed_round_counts_only_when_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    others = iter([0.0, 0.9, 0.0])  # of the rounds after the one that warms
    monkeypatch.setattr(frame.Watch, "others", lambda self: next(others, 0.0))
    monkeypatch.setattr(frame, "wait_quiet", lambda until: None)
    numbers = iter(range(100))
    assert rounds(2, lambda: float(next(numbers)))[0] == [1.0, 3.0]
    monkeypatch.setattr(frame.Watch, "others", lambda self: 0.9)
    assert len(rounds(3, lambda: 1.0, patience=0.0)[0]) == 3


def test_a_measurement_replaces_its_own_lines_and_no_others() -> None:
    old = [{"name": "a, one"}, {"name": "a, two"}, {"name": "b"}, {"name": "gone"}]
    assert report.merge(old, {"a": [{"name": "a, new"}]}, ["b", "a"]) == [{"name": "b"}, {"name": "a, new"}]


def test_every_measurement_has_what_the_frame_asks_for() -> None:
    for key, module in report.measures().items():
        assert isinstance(module.ORDER, int), key
        run = report.measures()[getattr(module, "WITH", key)]
        assert run.PYTHON in ("controller", "engine") and callable(run.run), key
        assert module.__doc__ and len(module.__doc__.splitlines()) > 2, key


def test_the_page_is_made_from_the_report() -> None:
    """docs/performance.md is what the committed report and docstrings give."""
    before = report.DOCUMENT.read_text()
    page = report.page(report.load(), report.machine_of(before))
    assert page == before


def test_the_table_says_what_says_nothing() -> None:
    rows = [PLACE.absolute("key", "s", [0.5, 1.0, 1.5, 2.0], Goal("at most", 1.3)).row()]
    told = report.table(rows)
    assert "unclear" in told and "says nothing" in told
    json.dumps(rows)


def test_what_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "HS_CACHE": str(tmp_path / "none"), "PYTHONPATH": str(ROOT)}
    before = set(Path("/dev/shm").glob("sglang-hs-bench-*"))
    # patch_time would fetch a wheel; it is stopped long before, while it starts
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "patch_time"], cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert "patch_time" in process.stderr.readline()
    until = time.monotonic() + 60
    while not list(tmp_path.glob("sglang-hs-bench-*/patch_time")):
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 130
    assert "stopped; nothing was written" in process.stderr.read()
    assert list(tmp_path.glob("sglang-hs-bench-*")) == []
    assert set(Path("/dev/shm").glob("sglang-hs-bench-*")) - before == set()


def test_the_page_on_large_data_sets_is_what_the_report_gives() -> None:
    from bench import capacity

    assert capacity.DOCUMENT.read_text() == capacity.page(report.load()), "run: python -m bench.capacity"


def test_the_first_limit_is_the_lowest_and_a_shared_disk_is_divided() -> None:
    from bench.capacity import Disk, first_limit, token_bytes

    token = token_bytes()
    own, shared = Disk("own", 100.0 * token, 1e12), Disk("shared", 100.0 * token, 0)
    assert first_limit(50, own, 80.0 * token, 64) == ("the engine", 50)
    assert first_limit(90, own, 80.0 * token, 64) == ("the client", 80)
    assert first_limit(90, shared, 80.0 * token, 2) == ("the disk", 50)


def test_a_figure_of_the_report_takes_the_place_of_an_assumption() -> None:
    from bench.capacity import measured

    assert not measured([])["book"].known
    book = measured([{"name": "book_size", "value": 77.0}])["book"]
    assert (book.known, book.value) == (True, 77.0) and "measured" in book.source


def test_a_measured_rate_comes_in_the_units_of_the_assumed_one() -> None:
    from bench import capacity

    row = {"name": "vs_specforge", "value": 0.5, "unit": "GB/s"}
    assert capacity.measured([row])["path"].value == 0.5e9
    assert capacity.measured([])["path"].value == 0.2e9
