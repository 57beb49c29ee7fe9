"""A real systemd host over real ssh, and what its timer, its boot and its jobs must survive: no controller, no link, no power; users with sudo and without."""

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

# A user of the host: op comes in by ssh, and may or may not use sudo.
OP = """
set -e
id op >/dev/null 2>&1 || useradd --create-home op
install -d -o op -g op -m 700 /home/op/.ssh
install -o op -g op -m 600 /root/.ssh/authorized_keys /home/op/.ssh/authorized_keys
"""
SUDO = "echo 'op ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/op"
AS_OP = ("-e", "ansible_user=op")


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

    def shell(self, script: str) -> str:
        """A shell script on the host, as root; its output. It must succeed."""
        words = [str(BIN / "ansible"), "-i", str(self.inventory), "sglang", "-m", "ansible.builtin.shell"]
        done = subprocess.run(
            [*words, "-a", script], cwd=REPO, env=self.env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.partition("\n")[2].strip()

    def play(self, book: str, *words: str) -> tuple[int, str]:
        """Run a playbook to its end: status and output."""
        command = [str(BIN / "ansible-playbook"), f"playbooks/{book}.yml", "-i", str(self.inventory), *words]
        done = subprocess.run(command, cwd=REPO, env=self.env, capture_output=True, text=True, timeout=900)
        return done.returncode, done.stdout + done.stderr

    def begin(self, *more: str) -> subprocess.Popen[bytes]:
        self.run("rm", "-rf", OUTPUT)
        words = [str(BIN / "ansible-playbook"), "playbooks/extract.yml", "-i", str(self.inventory), *more]
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
        # the engine's processes by fork (standins/_forked.py): half of each start's processor time; as they are in test_4_molecule
        molecule_env = {key: word for key, word in env.items() if key != "ANSIBLE_CONFIG"} | {"SGL_CPU_FORK": "1"}

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
    # A restore takes the guard's unit away at its end; what systemd then holds of a start that goes on is its default, 90 s.
    # Production of this host is back sooner than that, a large model's is not.
    remote.shell(
        "mkdir -p /etc/systemd/system.conf.d && printf '[Manager]\\nDefaultTimeoutStartSec=5s\\n' "
        "> /etc/systemd/system.conf.d/short.conf && systemctl daemon-reexec"
    )
    playing = remote.begin()
    remote.seen("the client starts")
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    remote.shell("cp /etc/systemd/system/sglang-hs-guard.* /var/tmp/")
    assert remote.back() == "guard: the extraction ended and nobody brought production back"
    remote.assert_as_before()
    assert remote.samples() == 64
    # as a restore leaves it that is ended between the run's close and its own end: the guard takes itself away
    remote.shell("cp /var/tmp/sglang-hs-guard.* /etc/systemd/system/; systemctl daemon-reload")
    remote.shell("systemctl enable --now sglang-hs-guard.timer")
    remote.shell("for i in $(seq 120); do ls /etc/systemd/system/sglang-hs-* || exit 0; sleep 1; done; exit 1")
    remote.assert_as_before()


def test_a_link_that_is_cut_for_a_while_is_waited_out_also_by_a_user_with_sudo(remote: Remote) -> None:
    remote.shell(OP + SUDO)
    playing = remote.begin(*AS_OP, "-e", "ansible_become=true")
    remote.seen("capture attached on 0 of")
    remote.rig("cut", NAME)
    time.sleep(20)
    remote.rig("heal", NAME)
    assert playing.wait(timeout=400) == 0, remote.log.read_text()[-3000:]
    assert remote.back() == "the run is over"
    remote.assert_as_before()
    assert remote.samples() == 64


def test_a_user_without_sudo_extracts_from_a_server_of_their_own(remote: Remote) -> None:
    """With systemd on the host, which is not theirs to use: sessions instead of units; the engine's folder is theirs to write to."""
    remote.shell(OP + "rm -f /etc/sudoers.d/op")
    source = json.loads((text := remote.run("cat", "/etc/hs-verify.json"))[text.index("{") :])["source"]
    words = f"{source}/srt/models {source}/srt/models/__pycache__ {source}/srt/models/deepseek_v2.py"
    remote.shell(f"chown op:op {words}; chmod -R a+rX $(dirname {source})")
    mine = {
        "hs_production_port": 30100,
        "hs_extraction_port": 30101,
        "hs_state_dir": "/home/op/hs",
        "hs_output_dir": "/home/op/samples",
        "hs_dump_dir": "/dev/shm/sglang_hs_op",
    }
    settings = (*AS_OP, "-e", json.dumps(mine))
    # the unit is root's: said before anything is done
    code, out = remote.play("extract", *AS_OP, "-e", json.dumps({**mine, "hs_production_port": 30000}))
    assert code == 2, out
    assert "ansible_become: true" in out
    # nothing of theirs would outlive the link on such a host: said before anything is done, too
    conf = "/etc/systemd/logind.conf.d/kill.conf"
    remote.shell(
        f"mkdir -p /etc/systemd/logind.conf.d; printf '[Login]\\nKillUserProcesses=yes\\n' > {conf}; systemctl restart systemd-logind"
    )
    code, out = remote.play("extract", *settings)
    assert code == 2, out
    assert "KillUserProcesses of logind" in out
    remote.shell(f"rm {conf}; systemctl restart systemd-logind")
    remote.shell(
        # the same command as the unit's, by hand, as op
        "pid=$(systemctl show -p MainPID --value sglang.service); "
        "tr '\\0' '\\n' < /proc/$pid/environ | grep -E '^(PYTHONPATH|SGLANG|TORCH|HF_|TRANS|OMP|PATH)' | sed 's/^/export /' > /home/op/env; "
        "tr '\\0' ' ' < /proc/$pid/cmdline | sed 's/--port 30000/--port 30100/' > /home/op/cmd; "
        "sed -i 's#HF_HOME=.*#HF_HOME=/home/op/hf#' /home/op/env; "
        "su op -c 'cd; set -a; . ./env; setsid $(cat cmd) > server.log 2>&1 < /dev/null &'; "
        "for i in $(seq 240); do generate 30100 && exit 0; sleep 1; done; tail -5 /home/op/server.log; exit 1"
    )
    try:
        before = remote.run("/usr/local/bin/tree-hash", source)
        code, out = remote.play("extract", *settings)
        assert code == 0, out
        assert before == remote.run("/usr/local/bin/tree-hash", source)
        assert remote.run("find", "/home/op/samples", "-name", "hs_*.safetensors").count("hs_") == 64
        assert "output_ids" in remote.run("/usr/local/bin/generate", "30100")
        assert "op" in remote.shell("ps -o user= -p $(pgrep -f -- '--port 30100' | head -1)")
        assert remote.shell("systemctl list-units --all --plain --no-legend 'sglang-hs*' | wc -l") == "0"
        code, out = remote.play("restore", *settings)
        assert (code, "changed=0" in out) == (0, True), out
    finally:
        remote.shell(f"pkill -u op -f -- '--port 30100' || true; chown root:root {words}")


@pytest.mark.long  # the fault matrix's sample has two power cuts, and `make faults` one at each step
def test_a_power_cut_the_boot_brings_production_back(remote: Remote) -> None:
    playing = remote.begin()
    remote.seen("capture attached on 0 of")
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()
    remote.rig("reboot", "--hard", NAME)
    assert remote.back() == "guard: the host was rebooted during the run"
    remote.assert_as_before()
