"""A sample of the fault matrix (`make faults` plays all of it): every step and every fault once, on a real systemd host over real ssh.

Several faults share a run where they can: each strikes at its own step.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_host import CACHE, REPO

sys.path.insert(0, str(REPO))
from tests.campaign.faults.cell import SETTINGS, play
from tests.campaign.faults.faults import FAULTS
from tests.campaign.faults.host import RIG, FaultHost
from tests.campaign.faults.moments import STEPS

PLANS = [
    "lock:fails",
    "patch:SIGINT",
    "lock:check",
    "stop:tags",
    "extract:start-at",
    "patch:GPU, stop:second",
    "lock:by hand, launch:SIGTERM, stop extraction:reboot",
    "patch:cut 20 s, canary:SIGHUP",
    "stop:upgraded, restore source:state full",
    "lock:cut",
    "launch:hangs",
    "launch:stopped, free GPUs:shm full",
    "canary:client killed",
    "extract:started",
    "launch:window",
    "launch:port, extract:output full, start production:SIGINT",
    "stop:twice, check production:SIGKILL, disarm:reboot",
]


def parsed(plan: str) -> list[tuple[str, str]]:
    pairs = [tuple(word.strip().split(":")) for word in plan.split(",")]
    return sorted(((step, fault) for step, fault in pairs), key=lambda pair: STEPS.index(pair[0]))


class Sample:
    """The runs of :data:`PLANS`, played on two hosts at once: most of their time is waiting."""

    def __init__(self) -> None:
        SETTINGS["hs_launch_timeout"] = (
            120  # a launch that nobody watches any more is waited for so long; seven hosts at once need more
        )
        self.todo: queue.Queue[str] = queue.Queue()
        for plan in PLANS:
            self.todo.put(plan)
        self.told: dict[str, str] = {}  # plan: what was wrong, "" where nothing was
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._work, args=(number,)) for number in range(2)]

    def _work(self, number: int) -> None:
        host: FaultHost | None = None
        while not self.stop.is_set():
            try:
                plan = self.todo.get_nowait()
            except queue.Empty:
                break
            try:
                if host is None:
                    # not pytest's folder: the path of an ssh control socket has at most 108 characters
                    folder = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
                    host = FaultHost(f"hs-sample-{number}", 51 + number, folder, CACHE)
                    host.up()
                result = play(host, *((step, FAULTS[fault]) for step, fault in parsed(plan)))
                told = ""
                if result.problems:
                    told = f"{result.problems}\n{result}\n{host.log.read_text()[-4000:]}\n{host.guard_log()}"
            except Exception as error:
                told = f"the test itself: {type(error).__name__}: {error}"
            self.told[plan] = told
            if told and host is not None:  # made anew
                host.down()
                host = None
        if host is not None:
            host.down()

    def wait(self, plan: str) -> str:
        """What was wrong in the run, once it is over."""
        while plan not in self.told:
            assert any(thread.is_alive() for thread in self.threads), self.told
            time.sleep(0.2)
        return self.told[plan]


@pytest.fixture(scope="module")
def sample() -> Iterator[Sample]:
    env = {**os.environ, "HS_CACHE": str(CACHE)}
    able = subprocess.run([sys.executable, str(RIG), "check"], env=env, capture_output=True, text=True)
    if able.returncode == 3:
        pytest.skip(f"no systemd host can be booted here: {(able.stdout + able.stderr).strip()}")
    found = Sample()
    for thread in found.threads:
        thread.start()
    yield found
    found.stop.set()
    for thread in found.threads:
        thread.join()


def test_the_sample_touches_every_step_and_every_fault() -> None:
    cells = [cell for plan in PLANS for cell in parsed(plan)]
    assert {step for step, _ in cells} == set(STEPS)
    assert {fault for _, fault in cells} == set(FAULTS)
    for step, fault in cells:
        assert step not in FAULTS[fault].instead, (step, fault)


@pytest.mark.parametrize("plan", PLANS)
def test_production_comes_back(sample: Sample, plan: str) -> None:
    told = sample.wait(plan)
    assert not told, told
