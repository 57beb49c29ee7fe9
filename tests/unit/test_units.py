"""The files of a run's units: what would change, and which are ours."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_hs import units


def test_only_what_differs_is_told(tmp_path: Path) -> None:
    same, other, new = (str(tmp_path / name) for name in ("same", "other", "new"))
    Path(same).write_text("a\n")
    Path(other).write_text("a\n")
    found = units.differences({same: "a\n", other: "b\n", new: "c\n"})
    assert found == [
        {"path": other, "before": "a\n", "after": "b\n"},
        {"path": new, "before": "", "after": "c\n"},
    ]
    assert not Path(new).exists()


def test_the_files_of_a_run_are_found_and_nothing_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, etc = tmp_path / "run", tmp_path / "etc"
    monkeypatch.setattr(units, "FOLDERS", (str(run), str(etc), str(tmp_path / "missing")))
    for folder in (run, etc):
        folder.mkdir()
    ours = [run / "sglang-hs-client.service", etc / "sglang-hs-guard.timer"]
    half_written = etc / ".sglang-hs-guard.service.x1y2"
    for path in (*ours, half_written, etc / "sglang.service"):
        path.write_text("")
    (etc / "sglang-hs-guard.service.d").mkdir()
    (etc / "sglang-hs-guard.service").symlink_to("/dev/null")
    assert set(units.files()) == {*ours, half_written, etc / "sglang-hs-guard.service"}


def test_a_unit_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        units.arm({str(tmp_path / "missing/sglang-hs-client.service"): "x"})
    assert not list(tmp_path.iterdir())
