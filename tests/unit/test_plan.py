"""What the plan says of work that is left, of lengths and of windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import dataset, fsio, plan, preflight
from sglang_hs.errors import HsError
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
    assert (found["done"], found["work"], found["space_line"]) == (3, False, "complete")
    assert "ended before" not in found["line"]
    moves = dict(settings, move_to="far:")
    told = "complete; 3 samples are still to be moved: playbooks/move.yml"
    assert plan.look(moves, False, 0.0)["space_line"] == told
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


# -- samples that move on ---------------------------------------------------------------------------------------------------


class Disk:
    """A file system of ``total`` bytes, ``free`` of them free."""

    def __init__(self, total: int, free: int) -> None:
        self.f_frsize, self.f_blocks, self.f_bfree, self.f_bavail = 1, total, free, free


def large(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, disk: Disk, **more: Any) -> str:
    """The line on the room for 5.03 TB: 87.7 million tokens of three boundaries of 7168 in bfloat16."""
    monkeypatch.setattr(plan.os, "statvfs", lambda place: disk)
    settings.update(
        model={"vocab_size": 163840, "hidden_size": 7168, "itemsize": 2}, boundaries=[3, 31, 59], in_flight=4
    )
    settings.update({"move_to": "store:bucket", "move_high_water": "80%", "archive": "none", "archive_gb": 1.0, **more})
    found = dataset.Scan("data.jsonl")
    found.samples, found.tokens, found.max_length = 125_000, 87_700_000, 8192
    return plan._room(settings, found, found.tokens, plan.token_bytes(settings), 20e9, 0)


def test_five_terabytes_over_a_host_with_one_are_planned(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = large(settings, monkeypatch, Disk(10**12, 9 * 10**11))
    assert told.startswith(
        "5,029.8 GB (4,684.3 GiB) to write, all of it to store:bucket; at most 700.0 GB (651.9 GiB) of it lie on "
    )
    assert "(hs_move_high_water 80%: 700.0 GB" in told and "2.3 GB (2.2 GiB) stay there to describe it" in told
    told = large(settings, monkeypatch, Disk(10**12, 9 * 10**11), move_high_water="250")
    assert "at most 250.0 GB" in told
    told = large(settings, monkeypatch, Disk(10**12, 9 * 10**11), remote={"free": 6 * 10**12})
    assert "all of it to store:bucket (6,000.0 GB (5,587.9 GiB) free there)" in told


@pytest.mark.parametrize(
    ("disk", "more", "told"),
    [
        (Disk(10**12, 2 * 10**11), {}, "there are 0.0 MB"),  # it is fuller than the mark already
        (Disk(10**12, 203 * 10**9), {}, "moving needs 4.2 GB"),  # what is on its way does not fit below it
        (Disk(10**12, 210 * 10**9), {"archive": "safetensors", "archive_gb": 20.0}, "moving needs 24.2 GB"),
        (Disk(10**12, 9 * 10**11), {"remote": {"free": 10**12}}, "which says that 1,000.0 GB"),
        (Disk(10**12, 9 * 10**11), {"move_to": ""}, "the output needs 5,0"),  # nothing moves: it must fit as ever
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, disk: Disk, more: dict[str, Any], told: str
) -> None:
    with pytest.raises(HsError) as refused:
        large(settings, monkeypatch, disk, **more)
    assert told in str(refused.value) and "production was not touched" in str(refused.value)


def test_what_was_moved_is_done_and_needs_no_file_here(settings: dict[str, Any]) -> None:
    output = extracted(settings)
    book = Manifest(output)
    book.moved("far:", [0, 2])
    book.close()
    (output / "hidden_states/hs_0.safetensors").unlink()
    (output / "hidden_states/hs_1.safetensors").unlink()
    found = plan.look(settings, False, 0.0)
    assert (found["done"], found["done_tokens"]) == (2, 5)


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf"])
def test_an_archive_has_a_size(wrong: str) -> None:
    with pytest.raises(HsError, match="hs_archive_gb"):
        preflight._moves({"move_to": "far:", "archive": "safetensors", "archive_gb": wrong})


def test_a_remote_has_one_name_also_in_a_plan() -> None:
    found = {"move_to": "far:a/"}
    preflight._moves(found)
    assert found["move_to"] == "far:a"


def test_what_waits_here_needs_room_at_the_remote_too(settings: dict[str, Any]) -> None:
    book = Manifest(extracted(settings))
    book.moved("far:", [0])  # of three, 100 bytes each
    book.close()
    Path(settings["dump_dir"]).mkdir()
    more = {"move_to": "far:", "move_high_water": "250", "archive": "none", "archive_gb": 1.0}
    assert "all of it to far:" in plan.look({**settings, **more, "remote": {"free": 200}}, False, 0.0)["space_line"]
    with pytest.raises(HsError, match="which says that"):
        plan.look({**settings, **more, "remote": {"free": 199}}, False, 0.0)
