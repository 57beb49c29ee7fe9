"""A dozen of the campaign's kills; `make kills COUNT=200` plays many more."""

from __future__ import annotations

import subprocess
import sys

from local_host import REPO


def test_a_dozen_kills_lose_nothing() -> None:
    words = [sys.executable, "tests/campaign/kills.py", "--count", "12", "--servers", "0.17"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=600)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    last = "kills: 12 of 12 runs complete and equal (client 10, scheduler 1, server 1)"
    assert done.stdout.splitlines()[-1] == last
