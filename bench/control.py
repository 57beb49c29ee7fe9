"""Playbooks on a real systemd host over real ssh, timed: what they take beside the engine's own work. Controller's Python."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .frame import ROOT

sys.path.insert(0, str(ROOT))

from tests.campaign.faults.host import OUTPUT, RIG, STATE, FaultHost

READY = "The server is fired up and ready to roll"
NAME, OCTET = "hs-bench", 52
PYTHON = "/usr/bin/python3"
# the campaign's host has disks that a test can fill
SETTINGS = {"hs_operator": "bench@controller", "hs_disk_reserve_gb": 0.01, "hs_stop_timeout": 20}


class Unable(RuntimeError):
    """No systemd host can be booted on this machine."""


class Host(FaultHost):
    """The campaign's host, with each ssh command and each task's beginning written down."""

    fork = ""

    def up(self) -> None:
        """Boot it as ever; its Python is named, as in the inventories that come with this project."""
        super().up()
        inventory = self.folder / "inventory/hosts.yml"
        known = json.loads(inventory.read_text())
        if Path(PYTHON).exists():  # the host's disk is this machine's
            known["sglang"]["hosts"][self.name]["ansible_python_interpreter"] = PYTHON
            inventory.write_text(json.dumps(known))

    @property
    def tasks(self) -> Path:
        """When each task began: bench/callbacks/bench_tasks.py."""
        return self.folder / "tasks.jsonl"

    @property
    def trips(self) -> Path:
        """A line for each ssh, sftp or scp."""
        return self.folder / "trips"

    @property
    def env(self) -> dict[str, str]:
        """The campaign's, and our callback."""
        return {
            **super().env,
            "ANSIBLE_CALLBACK_PLUGINS": f"{ROOT / 'callback_plugins'}:{ROOT / 'bench/callbacks'}",
            "ANSIBLE_CALLBACKS_ENABLED": "hs_exit_status,hs_live,bench_tasks",
            "BENCH_TASKS": str(self.tasks),
        }

    def task_lines(self) -> list[dict[str, Any]]:
        """Of the last playbook."""
        return [json.loads(line) for line in self.tasks.read_text().splitlines()]

    def timed(self, book: str, **settings: Any) -> Played:
        """Run a playbook to its end, which must be a good one."""
        words = ["-e", json.dumps({**SETTINGS, **settings})]
        for program in ("ssh", "sftp", "scp"):
            counted = self.folder / program
            counted.write_text(f'#!/bin/sh\necho {program} >> {self.trips}\nexec {shutil.which(program)} "$@"\n')
            counted.chmod(0o755)
            words += ["-e", f"ansible_{program}_executable={counted}"]
        for path in (self.tasks, self.trips):
            path.write_text("")
        began = time.time()
        code, out = self.play(book, *words)
        ended = time.time()
        if code:
            raise RuntimeError(f"{book} ended with {code}: {out[-4000:]}")
        return Played(began, ended, self.task_lines(), len(self.trips.read_text().splitlines()))


@dataclass(frozen=True)
class Played:
    """A playbook's run. began, ended: unix times. tasks: {at, task}. trips: how often an ssh program was started."""

    began: float
    ended: float
    tasks: list[dict[str, Any]]
    trips: int

    @property
    def wall(self) -> float:
        """Seconds from the shell's point of view."""
        return self.ended - self.began

    @property
    def before(self) -> float:
        """Seconds until the first task."""
        return float(self.tasks[0]["at"]) - self.began

    def longest(self, count: int) -> list[tuple[str, float]]:
        """The tasks that took longest (name, seconds until the next one), longest first."""
        pairs = zip(self.tasks, self.tasks[1:], strict=False)
        found = sorted(
            ((float(next_["at"]) - float(one["at"]), str(one["task"])) for one, next_ in pairs), reverse=True
        )
        return [(name, took) for took, name in found[:count]]


@dataclass(frozen=True)
class Parts:
    """Seconds of a whole run: wall (the playbook), down (production's first SIGTERM until it was seen to answer), load (the extraction
    server's start, until it says that it is ready), data (the client's life), production (production's start, until it says so),
    stop (production's end, from SIGTERM until nothing is left of it). ends (both engines' ends). trips: ssh programs started; tasks: begun."""

    wall: float
    down: float
    load: float
    data: float
    production: float
    stop: float
    ends: float
    trips: int
    tasks: int

    @property
    def engines(self) -> float:
        """What is not ours to shorten: loading and extracting."""
        return self.load + self.data + self.production


@contextlib.contextmanager
def host() -> Iterator[Host]:
    """A host with production answering, gone at the end; Unable where there can be none."""
    cache = Path(os.environ["HS_CACHE"])
    able = subprocess.run([sys.executable, str(RIG), "check"], capture_output=True, text=True, check=False)
    if able.returncode:
        raise Unable((able.stdout + able.stderr).strip())
    # the path of an ssh control socket has at most 108 characters
    found = Host(NAME, OCTET, Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp")), cache)
    try:
        found.up()
        yield found
    finally:
        found.down()


class Ready(threading.Thread):
    """Notes when the extraction server said that it is ready, from outside: its log has whole seconds only."""

    def __init__(self, runs: Path) -> None:
        super().__init__(daemon=True)
        self.runs = runs
        self.before = set(runs.glob("*/server.log"))
        self.at: float | None = None
        self.done = threading.Event()

    def run(self) -> None:
        """Until it said so."""
        while not self.done.wait(0.05):
            for log in set(self.runs.glob("*/server.log")) - self.before:
                if READY in log.read_text(errors="replace"):
                    self.at = time.time()
                    return


def extraction(host: Host) -> Parts:
    """One whole run of extract.yml on an empty output folder, taken apart."""
    host.inside(f"find {OUTPUT} -mindepth 1 -delete")
    runs = host.disk(STATE) / "runs"
    known = set(runs.glob("*")) if runs.is_dir() else set()
    ready = Ready(runs)
    ready.start()
    try:
        played = host.timed("playbooks/extract.yml")
    finally:
        ready.done.set()
        ready.join()
    (folder,) = set(runs.glob("*")) - known
    steps = json.loads((folder / "journal.json").read_text())["steps"]
    at = {(step["step"], step["state"]): float(step["at"]) for step in steps}
    said = host.ssh("journalctl --no-pager -o short-unix -u sglang.service").splitlines()
    answered = float([line for line in said if READY in line][-1].split()[0])
    if ready.at is None or answered < at["restore: start production", "begun"]:
        raise RuntimeError("an engine never said that it is ready")
    ends = sum(at[step, "done"] - at[step, "begun"] for step in ("stop", "restore: stop extraction"))
    stop = at["stop", "done"] - at["stop", "begun"]
    return Parts(
        wall=played.wall,
        down=at["restore: check production", "done"] - at["stop", "begun"],
        load=ready.at - at["launch", "begun"],
        data=(folder / "result.json").stat().st_mtime - at["extract", "begun"],
        production=answered - at["restore: start production", "begun"],
        stop=stop,
        ends=ends,
        trips=played.trips,
        tasks=len(played.tasks) - 1,
    )
