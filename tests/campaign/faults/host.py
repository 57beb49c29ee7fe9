"""A real systemd host over real ssh with a real SGLang server as production, made for being broken."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
OUTPUT, STATE = "/var/lib/hidden-states", "/var/lib/sglang-hs"
DISKS = {OUTPUT: "72M", STATE: "48M"}  # of the size that a test can fill
RIG = REPO / "molecule/rig/rig.py"


class FaultHost:
    """``name`` and the last part of its address; ``folder``: inventory, logs and the controller's home, on this machine."""

    fork = "1"  # its engine's processes by fork: half of a start's processor time (standins/_forked.py); "" as they are in production

    def __init__(self, name: str, octet: int, folder: Path, cache: Path) -> None:
        self.name, self.octet, self.folder, self.cache = name, octet, folder, cache
        self.tree = cache / "rig/hosts" / name  # its disks and file systems, as this machine sees them
        self.log = folder / "play.log"
        self.before: dict[str, Any] = {}
        self.source = ""
        self.options: list[str] = []
        self.address = ""
        self.settings: list[str] = []  # -e words of the cell that is played
        self.known: set[str] = set()  # runs before it

    # -- up and down ---------------------------------------------------------------------------------------------

    def rig(self, *words: str) -> str:
        """A verb of the rig."""
        done = subprocess.run(
            [sys.executable, str(RIG), *words], env=self.env, capture_output=True, text=True, timeout=180, check=False
        )
        if done.returncode:
            raise RuntimeError(f"rig.py {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    @property
    def env(self) -> dict[str, str]:
        """The controller's, private."""
        kept = {key: word for key, word in os.environ.items() if not key.startswith(("ANSIBLE_", "MAKE", "MFLAGS"))}
        return {
            **kept,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "ANSIBLE_HOME": str(self.folder / "home/.ansible"),
            "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
            "HS_CACHE": str(self.cache),
            "SGL_CPU_FORK": self.fork,
        }

    def up(self) -> None:
        """Boot it, write the inventory, start production and see it answer."""
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        engine = self.cache / "engine"
        prefix = subprocess.run(
            [str(engine / "venv/bin/python"), "-c", "import sys; print(sys.base_prefix)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        words = ["up", self.name, str(self.octet), "--shm", "512M", "--overlay", str(engine)]
        words += ["--bind-ro", prefix] if prefix != "/usr" else []
        for place, size in DISKS.items():
            words += ["--disk", f"{place}={size}"]
        told = json.loads(self.rig(*words))
        self.options = [
            *("-F", "none", "-i", told["identity_file"], "-o", "IdentitiesOnly=yes"),
            *("-o", f"UserKnownHostsFile={told['known_hosts']}", "-o", "GlobalKnownHostsFile=none"),
            *("-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=10"),
        ]
        self.address = str(told["address"])
        inventory = self.folder / "inventory"
        inventory.mkdir(exist_ok=True)
        shutil.copytree(REPO / "molecule/default/group_vars", inventory / "group_vars", dirs_exist_ok=True)
        variables = {
            "ansible_host": self.address,
            "ansible_user": told["user"],
            "ansible_ssh_common_args": " ".join(self.options)
            + f" -o ControlPath={self.folder}/cp-%C -o ServerAliveInterval=5 -o ServerAliveCountMax=6",
        }
        (inventory / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": {self.name: variables}}}))
        self.install_gpu()
        played = subprocess.run(
            self.command("molecule/default/prepare.yml"),
            cwd=REPO,
            env=self.env,
            capture_output=True,
            text=True,
            check=False,
        )
        if played.returncode:
            raise RuntimeError(played.stdout[-4000:])
        record = json.loads(self.ssh("cat /etc/hs-verify.json"))
        self.source = str(record["source"])
        self.before = self.look()

    def install_gpu(self) -> None:
        """The one fake: an nvidia-smi that counts the real schedulers, and strangers of which a file tells, as users of one GPU."""
        fake = Path(__file__).parent / "nvidia-smi"
        place = self.tree / "root/usr/local/bin/nvidia-smi"
        shutil.copyfile(fake, place)
        place.chmod(0o755)

    def down(self) -> None:
        """Remove every trace of it."""
        self.rig("down", self.name)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- doing something to it -----------------------------------------------------------------------------------

    def ssh(self, command: str, given: str = "", timeout: float = 180) -> str:
        """A command over ssh, as a stranger to Ansible would look."""
        done = subprocess.run(
            ["ssh", *self.options, f"root@{self.address}", command],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done.stdout

    def leader(self) -> int:
        """Its first process."""
        for path in sorted((Path("/sys/fs/cgroup")).glob(f"*/hs-rig-*/{self.name}/**/cgroup.procs")) + sorted(
            Path("/sys/fs/cgroup").glob(f"hs-rig-*/{self.name}/**/cgroup.procs")
        ):
            for pid in path.read_text().split():
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:
                    continue
                if any(line.startswith("NSpid:") and line.split()[2:] == ["1"] for line in lines):
                    return int(pid)
        raise RuntimeError(f"{self.name} does not run")

    def inside(self, script: str) -> str:
        """A shell script inside, not by the network: a fault strikes also while the link is cut, and at once."""
        words = [
            "nsenter",
            "--target",
            str(self.leader()),
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--root",
            "--wd=/",
        ]
        done = subprocess.run(
            [*words, "/bin/sh", "-c", f"cd /; {script}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
        )
        if done.returncode:
            raise RuntimeError(f"inside {self.name}: {script}: {done.stdout}{done.stderr}")
        return done.stdout

    def disk(self, place: str) -> Path:
        """A small disk, as this machine sees it."""
        return self.tree / f"disk{list(DISKS).index(place)}"

    def journal(self) -> dict[str, Any] | None:
        """The open run's journal, read past the network."""
        try:
            found = json.loads((self.disk(STATE) / "journal.json").read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def runs(self) -> set[str]:
        """Names of all runs, open or closed."""
        folder = self.disk(STATE) / "runs"
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    @property
    def model_file(self) -> Path:
        """The engine's file that is edited, as this machine sees it."""
        engine = self.cache / "engine"
        return self.tree / "overlay0/root" / Path(self.source).relative_to(engine) / "srt/models/deepseek_v2.py"

    def guard_log(self) -> str:
        """What systemd and the guard said, for whoever looks for the reason of a red cell."""
        try:
            return self.inside(
                "journalctl --no-pager -o short-precise -n 120 _PID=1 + _SYSTEMD_UNIT=sglang-hs-guard.service"
            )
        except RuntimeError as error:
            return str(error)

    # -- looking at it -------------------------------------------------------------------------------------------

    def look(self, patience: float = 0.0) -> dict[str, Any]:
        """All that must be as before, over ssh (look.py)."""
        script = (Path(__file__).parent / "look.py").read_text()
        found = json.loads(self.ssh(f"python3 - {self.source} {OUTPUT} {patience}", script))
        assert isinstance(found, dict)
        return found

    # -- playbooks -----------------------------------------------------------------------------------------------

    def command(self, book: str, *words: str) -> list[str]:
        """An ansible-playbook of this host."""
        return [str(BIN / "ansible-playbook"), book, "-i", str(self.folder / "inventory"), *words]

    def begin(self, book: str, *words: str, log: Path | None = None) -> subprocess.Popen[bytes]:
        """Start a playbook in a process group of its own, as a terminal does."""
        with (log or self.log).open("w") as handle:
            return subprocess.Popen(
                self.command(book, *words),
                cwd=REPO,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(
                    signal.SIGHUP, signal.SIG_DFL
                ),  # below nohup it is ignored, and stays so
            )

    def play(self, book: str, *words: str, timeout: float = 600) -> tuple[int, str]:
        """Run a playbook to its end: status and output."""
        log = self.folder / f"{Path(book).stem}.log"
        playing = self.begin(book, *words, log=log)
        try:
            return playing.wait(timeout), log.read_text()
        except subprocess.TimeoutExpired:
            os.killpg(playing.pid, signal.SIGKILL)
            playing.wait()
            return 124, log.read_text() + "\n(it did not end)"

    def wait_closed(self, patience: float) -> bool:
        """Whether the open run was closed within ``patience`` seconds."""
        until = time.monotonic() + patience
        while (self.disk(STATE) / "journal.json").exists() or (self.disk(STATE) / "lock").exists():
            if time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True
