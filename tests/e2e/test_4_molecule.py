"""Molecule: a real systemd host over real ssh, production as a unit. Skipped, with the reason, where this machine cannot run it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import BIN, CACHE, REPO, Host

# three servers at once on a small machine take minutes
LONG = ("fleet",)
SCENARIOS = [
    pytest.param(name, marks=pytest.mark.long) if name in LONG else name
    for name in sorted(path.parent.name for path in (REPO / "molecule").glob("*/molecule.yml"))
]


@pytest.fixture
def short_home() -> Iterator[Path]:
    """Molecule keeps ssh's control sockets below HOME, and a socket's path has at most 108 characters."""
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_molecule(host: Host, scenario: str, short_home: Path) -> None:
    env = {**host.env, "HOME": str(short_home), "ANSIBLE_HOME": str(short_home / ".ansible"), "HS_CACHE": str(CACHE)}
    del env["ANSIBLE_CONFIG"], env["SGL_CPU_FORK"]  # here the servers start as they do in production
    able = subprocess.run(
        [sys.executable, "molecule/rig/rig.py", "check"], cwd=REPO, env=env, capture_output=True, text=True
    )
    if able.returncode == 3:
        pytest.skip(f"molecule/{scenario} not run: {(able.stdout + able.stderr).strip()}")
    words = [str(BIN / "molecule"), "test", "--scenario-name", scenario]
    done = subprocess.run(
        words, cwd=REPO, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1800
    )
    print(done.stdout[-4000:])
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
