"""What the plan says of work that is left, of lengths and of windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import dataset, fsio, plan
from sglang_hs.manifest import Manifest

ROWS = [[1, 2, 3], [4], [5, 6]]


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in ROWS))
    return {
        "dataset": str(data),
        "model": {"vocab_size": 100, "hidden_size": 8, "itemsize": 2},
        "max_prompt": 8,
        "cut_to": None,
        "boundaries": [1, 2],
        "final": "pre_norm",
        "output_dir": str(tmp_path / "out"),
        "dump_dir": str(tmp_path / "dumps"),
        "state_dir": str(tmp_path / "state"),
        "in_flight": 1,
        "tokens_per_forward": 0,
        "window": "1h",
        "window_s": 3600.0,
    }


def extracted(settings: dict[str, Any]) -> Path:
    """An output folder in which every sample is done, as the client leaves it just before it describes the whole."""
    output = Path(settings["output_dir"])
    (output / "hidden_states").mkdir(parents=True)
    book = Manifest(output)
    book.claim(
        {
            "dataset_sha256": dataset.digest(settings["dataset"]),
            "cut_to": None,
            "hidden_size": 8,
            "boundaries": [1, 2],
            "final": "pre_norm",
        }
    )
    book.add([(idx, str(idx), len(ids), None) for idx, ids in enumerate(ROWS)])
    for idx in range(len(ROWS)):
        file = f"hidden_states/hs_{idx}.safetensors"
        (output / file).write_bytes(b"x" * 100)
        book.done(idx, file, 100, "0" * 64)
    book.close()
    return output


def test_a_folder_with_every_sample_and_no_description_is_not_finished(settings: dict[str, Any]) -> None:
    output = extracted(settings)
    found = plan.look(settings, False, 0.0)
    assert (found["done"], found["work"]) == (3, True)
    assert "ended before it wrote samples.jsonl and manifest.json" in found["line"]
    (output / "samples.jsonl").write_text("{}\n" * 3)
    described = {"counts": {"pending": 1}, "samples": {"rows": 3}}  # of an earlier run, which did not get through
    (output / "manifest.json").write_text(json.dumps(described))
    assert plan.look(settings, False, 0.0)["work"] is True
    (output / "manifest.json").write_text(json.dumps(dict(described, counts={"pending": 0})))
    found = plan.look(settings, False, 0.0)
    assert (found["done"], found["work"]) == (3, False)
    assert "ended before" not in found["line"]
    (output / "samples.jsonl").unlink()
    assert plan.look(settings, False, 0.0)["work"] is True


def test_the_histogram_shows_every_length(settings: dict[str, Any]) -> None:
    assert plan.look(settings, False, 0.0)["lengths"] == [
        "        1 tokens          1  33.3%  " + "#" * 40,
        "        2 tokens          1  33.3%  " + "#" * 40,
        "        4 tokens          1  33.3%  " + "#" * 40,
    ]


@pytest.mark.parametrize(
    ("speed", "told"), [(100.0, "1 min 40 s"), (6 / 9000, "2 h 35 min"), (6 / 36000, "10 h 18 min")]
)
def test_the_time_is_that_of_the_last_complete_run_and_counts_the_windows(
    settings: dict[str, Any], speed: float, told: str
) -> None:
    folder = Path(settings["state_dir"]) / "runs" / "20261130-000000-abcd"
    folder.mkdir(parents=True)
    took = 600 / speed
    # 100 s of loading and stopping around the extraction itself
    closed = {"opened": 0.0, "steps": [{"step": "restore", "state": "done", "at": took + 100}]}
    fsio.write_json(folder / "result.json", {"outcome": "complete", "tokens_this_run": 600, "seconds": took})
    fsio.write_json(folder / "journal.json", closed)
    line = plan.look(settings, False, 0.0)["time_line"]
    assert line.startswith("about " + told), line
    windows = {100.0: None, 6 / 9000: "; 3 windows of 1h", 6 / 36000: "; 11 windows of 1h"}[speed]
    assert line.endswith(windows) if windows else "windows" not in line
    # a window that is hardly longer than the loading is told as that, not as hundreds of windows
    settings.update(window="130s", window_s=130.0)
    short = plan.look(settings, False, 0.0)["time_line"]
    wanted = "a window of 130s leaves 5 s for it beside the loading: give it a longer one (hs_window)"
    assert short.endswith(wanted) if windows else "leaves" not in short, short
