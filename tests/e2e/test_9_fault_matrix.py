"""A sample of the fault matrix (`make faults` plays all of it): every step and every fault once, on a real systemd host over real ssh.

Several faults share a run where they can: each strikes at its own step.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import CACHE, REPO

sys.path.insert(0, str(REPO))
from tests.campaign.faults.cell import play
from tests.campaign.faults.faults import FAULTS
from tests.campaign.faults.host import RIG, FaultHost
from tests.campaign.faults.moments import STEPS

PLANS = [
    "lock:fails",
    "patch:SIGINT",
    "lock:check",
    "stop:tags",
    "extract:start-at",
    "patch:GPU, stop:second, extract:SIGKILL",
    "lock:by hand, launch:SIGTERM, start production:reboot",
    "patch:cut 20 s, canary:SIGHUP",
    "stop:upgraded, restore source:state full",
    "launch:hangs, stop extraction:cut",
    "launch:stopped, free GPUs:shm full",
    "canary:client killed",
    "extract:started",
    "launch:window",
    "extract:output full, launch:port",
    "stop:twice, check production:SIGKILL, disarm:SIGINT",
]


def parsed(plan: str) -> list[tuple[str, str]]:
    pairs = [tuple(word.strip().split(":")) for word in plan.split(",")]
    return sorted(((step, fault) for step, fault in pairs), key=lambda pair: STEPS.index(pair[0]))


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[FaultHost]]:
    """The host that the runs share; made anew after one that was red."""
    env = {**os.environ, "HS_CACHE": str(CACHE)}
    able = subprocess.run([sys.executable, str(RIG), "check"], env=env, capture_output=True, text=True)
    if able.returncode == 3:
        pytest.skip(f"no systemd host can be booted here: {(able.stdout + able.stderr).strip()}")
    found: list[FaultHost] = []
    yield found
    for host in found:
        host.down()


def test_the_sample_touches_every_step_and_every_fault() -> None:
    cells = [cell for plan in PLANS for cell in parsed(plan)]
    assert {step for step, _ in cells} == set(STEPS)
    assert {fault for _, fault in cells} == set(FAULTS)
    for step, fault in cells:
        assert step not in FAULTS[fault].instead, (step, fault)


@pytest.mark.parametrize("plan", PLANS)
def test_production_comes_back(hosts: list[FaultHost], plan: str) -> None:
    if not hosts:
        # not pytest's folder: the path of an ssh control socket has at most 108 characters
        host = FaultHost("hs-sample", 51, Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp")), CACHE)
        hosts.append(host)
        host.up()
    result = play(hosts[0], *((step, FAULTS[fault]) for step, fault in parsed(plan)))
    print(result)
    if result.problems:
        told = hosts[0].log.read_text()[-4000:]
        hosts.pop().down()
        pytest.fail(f"{result.problems}\n{result}\n{told}")
