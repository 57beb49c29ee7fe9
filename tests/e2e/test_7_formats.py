"""A real run's samples in every format, judged by the trainers' own packages; and a finished output as a data set."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_host import CACHE, FORMATS, Host
from trainers import PATHS, judged

DATASET = CACHE / "engine/dataset.jsonl"


def exported(finished: Path, name: str) -> Path:
    return finished.with_name(f"{finished.name}-{name}")


@pytest.fixture(scope="module")
def exports(host: Host, finished: Path) -> Path:
    """The three exports, made by the playbook."""
    played = host.play("export", extra={"hs_formats": FORMATS, "hs_output_dir": str(finished)})
    assert played.code == 0, played.out
    assert "specforge: 64 samples in" in " ".join(played.out.split())
    assert played.recap("changed") >= 1
    return finished


def test_export_again_verifies_and_changes_nothing(host: Host, exports: Path) -> None:
    stamps = {path: path.stat().st_mtime_ns for path in exports.parent.rglob("*.*pt")}
    assert len(stamps) >= 3 * 64
    again = host.play("export", extra={"hs_formats": FORMATS, "hs_output_dir": str(exports)})
    assert again.code == 0, again.out
    assert again.recap("changed") == 0, again.out
    assert "0 files written, 64 verified" in " ".join(again.out.split())
    assert "native: 64 samples" in " ".join(again.out.split())
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_check_mode_writes_nothing_and_a_missing_state_is_told(host: Host, exports: Path) -> None:
    place = exports.parent / "elsewhere"
    extra = {"hs_formats": "modelopt", "hs_output_dir": str(exports), "hs_export_dir": str(place)}
    looked = host.play("export", "--check", extra=extra)
    assert looked.code == 0, looked.out
    assert "64 files to write" in " ".join(looked.out.split())
    assert not place.exists()
    refused = host.play("export", extra={"hs_formats": ["specforge"], "hs_output_dir": str(exports / "hidden_states")})
    assert refused.code == 2
    assert "there is no finished extraction in" in " ".join(refused.out.split())


@pytest.mark.parametrize("reader", list(PATHS))
def test_the_trainers_own_reader_takes_it(host: Host, exports: Path, reader: str, tmp_path: Path) -> None:
    folders = {
        "speculators-0.9": exports,
        "speculators-0.7": exported(exports, "speculators-pt"),
        "specforge": exported(exports, "specforge"),
        "modelopt": exported(exports, "modelopt"),
    }
    if reader == "speculators-0.3":
        place = exports.parent / "post"
        extra = {
            "hs_formats": ["speculators-pt"],
            "hs_output_dir": str(exports),
            "hs_export_dir": str(place),
            "hs_export_final": "post_norm",
        }
        played = host.play("export", extra=extra)
        assert played.code == 0, played.out
        folders[reader] = place / "speculators-pt"
    told = judged(reader, exports, folders[reader], DATASET, tmp_path / "printed.py")
    assert "64 samples of" in told
    assert ("the printed commands run" in told) == (reader != "speculators-0.3")
    assert told.count("spoiled (") == 3, told


def test_a_finished_output_is_an_arrow_data_set_to_extract_again(host: Host, finished: Path) -> None:
    extra = {"hs_dataset": str(finished), "hs_output_dir": str(finished.with_name("of-arrow"))}
    looked = host.play("extract", "--check", extra=extra)
    assert looked.code == 0, looked.out
    assert "64 samples" in " ".join(looked.out.split())
