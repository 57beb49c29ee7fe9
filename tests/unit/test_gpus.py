"""The memory of GPUs that production leaves. No machine of the tests has one: nvidia-smi is a fake that reads two files."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from sglang_hs import gpus, procs, production
from sglang_hs.errors import HsError

FAKE = """#!/bin/sh
# a fake: what a driver would say is in two files
case "$*" in
  *compute-apps*) cat {folder}/apps;;
  *uuid*) cat {folder}/memory;;
esac
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with ``apps`` (uuid, pid, MiB) and ``memory`` (uuid, MiB)."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(FAKE.format(folder=tmp_path))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def test_the_baseline_is_what_is_left_without_production(driver: Path) -> None:
    (driver / "memory").write_text("GPU-a, 90000\nGPU-b, 88000\n")
    (driver / "apps").write_text("GPU-a, 11, 89000\nGPU-b, 12, 80000\nGPU-b, 99, 7000\n")
    assert gpus.baseline({11, 12}) == {"GPU-a": 1000, "GPU-b": 8000}
    assert gpus.strangers({11, 12}) == [99]


def test_a_gpu_of_which_the_driver_does_not_tell_is_left_out(driver: Path) -> None:
    (driver / "memory").write_text("GPU-a, 90000\nGPU-b, 88000\n")
    (driver / "apps").write_text("GPU-a, 11, [N/A]\nGPU-b, 12, 80000\n")
    assert gpus.baseline({11, 12}) == {"GPU-b": 8000}


def test_memory_that_comes_back_late_is_waited_for(driver: Path) -> None:
    (driver / "memory").write_text("GPU-a, 90000\n")
    (driver / "apps").write_text("")

    def given_back() -> None:
        new = driver / "memory.new"
        new.write_text("GPU-a, 1300\n")
        new.replace(driver / "memory")

    threading.Timer(1, given_back).start()
    production.wait_released([], None, 60, {"GPU-a": 1000})
    assert (driver / "memory").read_text() == "GPU-a, 1300\n"


def test_memory_that_a_stranger_holds_is_told_with_his_name(driver: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as stranger:
        (driver / "memory").write_text("GPU-a, 90000\n")
        (driver / "apps").write_text(f"GPU-a, {stranger.pid}, 89000\n")
        with pytest.raises(HsError) as told:
            production.wait_released([], None, 0.5, {"GPU-a": 1000})
        assert "GPU-a has 90000 MiB in use, without production it had 1000" in str(told.value)
        process = procs.read(stranger.pid)
        assert process is not None
        assert process.describe() in str(told.value)
        assert stranger.poll() is None
        stranger.kill()
