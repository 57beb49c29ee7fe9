"""The demo as a newcomer runs it: interrupted in its middle, started again, and once more."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import REPO, Host, end_host


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Host]:
    (tmp_path / "home").mkdir()
    host = Host(tmp_path, 1)
    yield host
    end_host(host)


def last_line(host: Host) -> str:
    done = subprocess.run(
        ["make", "demo"], cwd=REPO, env=host.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.usefixtures("host")  # the engine is built by then
def test_demo_interrupted_then_twice(newcomer: Host) -> None:
    wanted = f"demo: 64 samples in {newcomer.samples}; production answers; engine source unchanged"
    with (newcomer.folder / "play.log").open("w") as log:
        first = subprocess.Popen(
            ["make", "demo"],
            cwd=REPO,
            env=newcomer.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        newcomer.wait_for("the launch", lambda: newcomer.step_begun("launch"))
        os.killpg(first.pid, signal.SIGINT)  # Ctrl-C
        assert first.wait(timeout=60) != 0
    assert last_line(newcomer) == wanted
    assert last_line(newcomer) == wanted
