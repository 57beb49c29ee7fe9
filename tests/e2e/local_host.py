"""A real host for the end-to-end tests: this machine, a real SGLang server started by hand, the playbooks as an operator runs them.

Each host lives in a folder and on ports of its own; HOME and ANSIBLE_HOME are private. The engine's cache is shared (HS_CACHE).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_hs import procs, server

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# before a test changes HOME
FORMATS = ["native", "speculators-pt", "specforge", "modelopt"]
CACHE = Path(
    os.environ.get("HS_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-hidden-states"
)
PLAY_PATIENCE = 900


@dataclass
class Played:
    """How an ansible-playbook ended."""

    code: int
    out: str

    def recap(self, key: str) -> int:
        """A number of the recap's line: changed, failed, rescued..."""
        line = [line for line in self.out.splitlines() if "failed=" in line][-1]
        return int(dict(pair.split("=") for pair in line.split() if "=" in pair)[key])


def free_ports() -> int:
    """A port that is free together with the next one, below those that the kernel gives to outgoing connections.

    One of these could be on the extraction's port for the moment in which the server wants to listen there.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10240, min(lowest, 32768) - 1)
        with socket.socket() as first, socket.socket() as second:
            try:
                first.bind(("127.0.0.1", port))
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@dataclass
class Host:
    """A folder with a private copy of the engine, a production server, the state and the samples."""

    folder: Path
    tp: int
    port: int = field(default_factory=free_ports)
    release: str = ""  # of SGLang; empty: the local engine's own
    fork: str = ""  # "1": its servers' processes by fork, half of a start's processor time (standins/_forked.py)

    @property
    def env(self) -> dict[str, str]:
        return {
            # nothing of the caller's Ansible, nor of a `make test` around this
            **{key: word for key, word in os.environ.items() if not key.startswith(("ANSIBLE_", "MAKE", "MFLAGS"))},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "ANSIBLE_HOME": str(self.folder / "home/.ansible"),
            "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
            "HS_CACHE": str(CACHE),
            "HS_LOCAL_DIR": str(self.folder),
            "HS_LOCAL_PORT": str(self.port),
            "HS_LOCAL_TP": str(self.tp),
            "HS_LOCAL_RELEASE": self.release,
            "SGL_CPU_FORK": self.fork,
        }

    def command(self, book: str, *words: str, inventory: str = "local") -> list[str]:
        return [str(BIN / "ansible-playbook"), f"playbooks/{book}.yml", "-i", f"inventory/{inventory}", *words]

    def play(self, book: str, *words: str, extra: dict[str, Any] | None = None, path: str = "") -> Played:
        """Run a playbook to its end."""
        more = ["-e", json.dumps(extra)] if extra else []
        env = self.env
        if path:
            env["PATH"] = f"{path}:{env['PATH']}"
        done = subprocess.run(
            [*self.command(book, *words), *more],
            cwd=REPO,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PLAY_PATIENCE,
        )
        return Played(done.returncode, done.stdout)

    def begin(self, book: str, *words: str) -> subprocess.Popen[str]:
        """Start a playbook in a process group of its own and go on."""
        return subprocess.Popen(
            self.command(book, *words),
            cwd=REPO,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=open(self.folder / "play.log", "a"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # below a shell's background job Ctrl-C is ignored, and stays so
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    # -- what is to be seen from outside -------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def samples(self) -> Path:
        return self.folder / "samples"

    @property
    def finished(self) -> Path:
        """A finished output for every format, kept by the test of the story for those of the formats."""
        return self.folder / "finished"

    @property
    def finished_page(self) -> Path:
        """The page of the run that made :attr:`finished`, as the run itself wrote it: later plays may write it again."""
        return self.folder / "finished.html"

    def keep_page(self) -> None:
        """Keep that page; called when :attr:`finished` is made."""
        run_id = json.loads(next((self.finished / "runs").glob("*.json")).read_text())["run"]["id"]
        self.finished_page.write_bytes((self.folder / f"reports/localhost-{run_id}.html").read_bytes())

    @property
    def dumps(self) -> Path:
        return Path(f"/dev/shm/sglang_hs_local_{self.port}")

    @property
    def source(self) -> Path:
        return next(self.folder.glob("engine/lib/python3*/site-packages/sglang/srt/models/deepseek_v2.py"))

    def production(self) -> procs.Process:
        """The process that serves now."""
        process = procs.listeners(self.port)[0].process
        assert process is not None
        return process

    def signature(self) -> dict[str, Any]:
        """What must be the same before and after: production's argv, environment, folder, user; the source's bytes and mtime."""
        adopted = procs.adoption(self.production())
        kept = {
            key: adopted[key] for key in ("argv", "env", "cwd", "uid", "gid", "groups", "umask", "stdout", "stderr")
        }
        return {
            **kept,
            "source": hashlib.sha256(self.source.read_bytes()).hexdigest(),
            "mtime": self.source.stat().st_mtime_ns,
        }

    def assert_back(self, before: dict[str, Any]) -> None:
        """Production as it was and generating; no lock, journal, dump, edit or process left."""
        server.generate(self.url)
        assert self.signature() == before
        assert not (self.state / "journal.json").exists()
        assert not (self.state / "lock").exists()
        assert not self.dumps.exists()
        assert not list((self.state / "backup").glob("*")) if (self.state / "backup").exists() else True
        self.assert_nothing_runs()

    def assert_nothing_runs(self, patience: float = 15) -> None:
        """No process of the project is left; the guard may take its period to see that no run is open."""
        until = time.monotonic() + patience
        while self.strays() and time.monotonic() < until:
            time.sleep(0.2)
        assert self.strays() == []

    def strays(self) -> list[str]:
        """Processes of the project that still run for this host."""
        ours = [
            process
            for process in procs.everyone()
            if str(self.state) in process.command or str(self.port + 1) in process.argv
        ]
        return [process.describe() for process in ours]

    def journal(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.state / "journal.json").read_text())
        except FileNotFoundError:
            return {"steps": []}
        return found

    def wait_for(self, what: str, seen: Any, patience: float = 240) -> Any:
        """Wait until ``seen()`` is true; its value."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            value = seen()
            if value:
                return value
            time.sleep(0.05)
        log = self.folder / "play.log"
        raise AssertionError(f"not seen within {patience} s: {what}\n{log.read_text()[-3000:] if log.exists() else ''}")

    def step_begun(self, step: str) -> bool:
        return any(record["step"] == step for record in self.journal()["steps"])

    def start_production(self) -> None:
        words = [sys.executable, "demo/production.py", "start", str(self.folder), str(self.port)]
        subprocess.run(words, cwd=REPO, env=self.env, check=True, timeout=400)

    def forget_samples(self) -> None:
        subprocess.run(["rm", "-rf", str(self.samples)], check=True)


def run_in_the_engines_python(host: Host, folder: str, patience: float) -> None:
    """The tests in ``folder``, run by the engine's interpreter: it has torch. pytest is this one's, which is of the same minor version."""
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    words = [str(CACHE / "engine/venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", folder]
    env = {**host.env, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=patience)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def make_host(folder: Path, tp: int, release: str = "", fork: str = "") -> Host:
    host = Host(folder, tp, release=release, fork=fork)
    (folder / "home").mkdir()
    built = host.play("local_engine")
    assert built.code == 0, built.out
    host.start_production()
    return host


def end_host(host: Host) -> None:
    """End what this host's tests started: processes whose command names its folder or its ports."""
    host.play("restore")
    for listener in procs.listeners(host.port):
        if listener.process is not None and str(host.folder) in listener.process.command:
            procs.end(procs.family(listener.process.pid), 15)
    for process in procs.everyone():
        if str(host.state) in process.command:
            procs.signal_process(process, signal.SIGKILL)
