"""A real systemd host over real ssh, and what its timer, its boot and its jobs must survive: no controller, no link, no power."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_host import BIN, CACHE, REPO, Host

NAME = "sglang-default"
OUTPUT = "/var/lib/hidden-states"


@dataclass
class Remote:
    """The host of molecule/default, with production serving as a unit."""

    env: dict[str, str]
    inventory: Path
    log: Path

    def run(self, *command: str) -> str:
        """A command on the host; its output, also when it fails."""
        words = [
            str(BIN / "ansible"),
            "-i",
            str(self.inventory),
            "sglang",
            "-m",
            "ansible.builtin.command",
            "-a",
            " ".join(command),
        ]
        done = subprocess.run(words, cwd=REPO, env=self.env, capture_output=True, text=True, timeout=120)
        return done.stdout

    def rig(self, *words: str) -> None:
        subprocess.run([sys.executable, "molecule/rig/rig.py", *words], cwd=REPO, env=self.env, check=True, timeout=120)

    def begin(self) -> subprocess.Popen[bytes]:
        self.run("rm", "-rf", OUTPUT)
        words = [str(BIN / "ansible-playbook"), "playbooks/extract.yml", "-i", str(self.inventory)]
        return subprocess.Popen(
            words,
            cwd=REPO,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def seen(self, text: str) -> None:
        """Wait until the playbook says so."""
        until = time.monotonic() + 300
        while text not in self.log.read_text():
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            time.sleep(0.2)

    def back(self) -> str:
        """Wait until the run is closed; why it was, from its journal."""
        until = time.monotonic() + 300
        while "no run is open" not in (status := self.run("/var/lib/sglang-hs/hs", "status")):
            assert time.monotonic() < until, status
            time.sleep(2)
        newest = self.run("sh -c 'cat $(ls -d /var/lib/sglang-hs/runs/* | tail -1)/journal.json'")
        journal: dict[str, Any] = json.loads(newest[newest.index("{") :])
        return str(journal["closed"]["why"])

    def assert_as_before(self) -> None:
        record = json.loads((text := self.run("cat", "/etc/hs-verify.json"))[text.index("{") :])
        assert record["source_hash"] in self.run("/usr/local/bin/tree-hash", record["source"])
        assert "output_ids" in self.run("/usr/local/bin/generate", "30000")
        assert self.run("systemctl", "is-active", "sglang.service").strip().endswith("active")
        assert "sglang-hs" not in self.run("systemctl", "list-units", "--all", "--plain", "--no-legend")
        assert "/lock" not in self.run(
            "find", "/var/lib/sglang-hs", "-name", "lock", "-o", "-name", "journal.json", "-maxdepth", "1"
        )

    def samples(self) -> int:
        return self.run("find", OUTPUT, "-name", "hs_*.safetensors").count("hs_")


@pytest.fixture(scope="module")
def remote(host: Host) -> Iterator[Remote]:
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        home = Path(folder)
        env = {**host.env, "HOME": folder, "ANSIBLE_HOME": f"{folder}/.ansible", "HS_CACHE": str(CACHE)}
        able = subprocess.run(
            [sys.executable, "molecule/rig/rig.py", "check"], cwd=REPO, env=env, capture_output=True, text=True
        )
        if able.returncode == 3:
            pytest.skip(f"no systemd host can be booted here: {(able.stdout + able.stderr).strip()}")
        molecule_env = {key: word for key, word in env.items() if key != "ANSIBLE_CONFIG"}

        def molecule(verb: str) -> None:
            words = [str(BIN / "molecule"), verb, "--scenario-name", "default"]
            done = subprocess.run(words, cwd=REPO, env=molecule_env, capture_output=True, text=True, timeout=1200)
            assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]

        try:
            molecule("create")
            molecule("prepare")
            yield Remote(env, next(home.glob(".ansible/tmp/molecule.*/inventory")), home / "play.log")
        finally:
            molecule("destroy")


def test_kill_9_of_the_controller_the_timer_brings_production_back(remote: Remote) -> None:
    playing = remote.begin()
    remote.seen("the client starts")
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    assert remote.back() == "guard: the extraction ended and nobody brought production back"
    remote.assert_as_before()
    assert remote.samples() == 64


def test_a_link_that_is_cut_for_a_while_is_waited_out(remote: Remote) -> None:
    playing = remote.begin()
    remote.seen("capture attached on 0 of")
    remote.rig("cut", NAME)
    time.sleep(20)
    remote.rig("heal", NAME)
    assert playing.wait(timeout=400) == 0, remote.log.read_text()[-3000:]
    assert remote.back() == "the run is over"
    remote.assert_as_before()
    assert remote.samples() == 64


def test_a_power_cut_the_boot_brings_production_back(remote: Remote) -> None:
    playing = remote.begin()
    remote.seen("capture attached on 0 of")
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    remote.rig("reboot", "--hard", NAME)
    assert remote.back() == "guard: the host was rebooted during the run"
    remote.assert_as_before()
