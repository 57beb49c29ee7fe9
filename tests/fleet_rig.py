"""Several real systemd hosts over real ssh, each with a real SGLang server as production, under one inventory: molecule/fleet's, without molecule."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RIG = REPO / "molecule/rig/rig.py"
OUTPUT, PORT = "/var/lib/hidden-states", 30000


class FleetRig:
    """``hosts``: name -> last part of its address. ``folder`` (of a short path): inventory, data set, catalogues, the controller's home."""

    def __init__(self, hosts: dict[str, int], folder: Path, cache: Path) -> None:
        self.hosts, self.folder, self.cache = hosts, folder, cache
        self.addresses: dict[str, str] = {}

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
            "HS_FLEET_TEST": str(self.folder),
        }

    def rig(self, *words: str) -> str:
        """A verb of the rig."""
        done = subprocess.run(
            [sys.executable, str(RIG), *words], env=self.env, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise RuntimeError(f"rig.py {' '.join(words)}: {done.stdout}{done.stderr}")
        return done.stdout

    def up(self, rows: int, longest: int = 400, production: bool = True) -> None:
        """Boot them, write inventory and data set; with ``production`` start it everywhere and see it answer."""
        (self.folder / "home").mkdir(parents=True, exist_ok=True)
        engine = self.cache / "engine"
        words = [str(engine / "venv/bin/python"), "-c", "import sys; print(sys.base_prefix)"]
        prefix = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        known: dict[str, Any] = {}
        for name, octet in self.hosts.items():
            mounts = ["--overlay", str(engine), *(["--bind-ro", prefix] if prefix != "/usr" else [])]
            told = json.loads(self.rig("up", name, str(octet), "--shm", "512M", *mounts))
            self.addresses[name] = str(told["address"])
            options = [
                *("-F none -o IdentitiesOnly=yes -o GlobalKnownHostsFile=none -o StrictHostKeyChecking=yes".split()),
                *(f"-i {told['identity_file']} -o UserKnownHostsFile={told['known_hosts']}".split()),
                *(f"-o ControlPath={self.folder}/cp-%C -o ServerAliveInterval=5 -o ServerAliveCountMax=3".split()),
            ]
            known[name] = {
                "ansible_host": told["address"],
                "ansible_user": told["user"],
                "ansible_ssh_common_args": " ".join(options),
            }
        inventory = self.folder / "inventory"
        shutil.copytree(REPO / "molecule/fleet/group_vars", inventory / "group_vars", dirs_exist_ok=True)
        (inventory / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": known}}))
        make = REPO / "roles/local_engine/files/tools/make_dataset.py"
        words = [sys.executable, str(make), str(self.folder / "data.jsonl"), "--model", str(engine / "model")]
        words += ["--count", str(rows), "--longest", str(longest), "--seed", "7"]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        code, out = self.play("../molecule/default/prepare") if production else (0, "")
        if code:
            raise RuntimeError(out[-6000:])

    def down(self) -> None:
        """Remove every trace of them, of each also where another's removal fails."""
        failures = []
        for name in self.hosts:
            try:
                self.rig("down", name)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                failures.append(str(error))
        if failures:
            raise RuntimeError("; ".join(failures))

    def command(self, book: str, *words: str, **extra: Any) -> list[str]:
        """An ansible-playbook of these hosts."""
        more = ["-e", json.dumps(extra)] if extra else []
        return [
            str(BIN / "ansible-playbook"),
            f"playbooks/{book}.yml",
            "-i",
            str(self.folder / "inventory"),
            *words,
            *more,
        ]

    def play(self, book: str, *words: str, **extra: Any) -> tuple[int, str]:
        """Run it to its end: status and output."""
        done = subprocess.run(
            self.command(book, *words, **extra),
            cwd=REPO,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
        )
        return done.returncode, done.stdout

    def place(self, name: str, path: str) -> Path:
        """A path on a host, as this machine sees it."""
        return self.cache / "rig/hosts" / name / "root" / path.lstrip("/")

    def journals(self) -> dict[str, list[dict[str, Any]]]:
        """Host -> the closed runs' steps, those of its last run."""
        found = {}
        for name in self.hosts:
            runs = sorted(self.place(name, "/var/lib/sglang-hs/runs").glob("*/journal.json"))
            found[name] = json.loads(runs[-1].read_text())["steps"] if runs else []
        return found
