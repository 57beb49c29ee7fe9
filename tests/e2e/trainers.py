"""The trainers' own packages, beside the engine's environment: installed once into the cache, without dependencies."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from local_host import CACHE, REPO

PINS = REPO / "tests/readers"
PYTHON = CACHE / "engine/venv/bin/python"
# what each reader needs on its path, the first before the others
PATHS = {
    "speculators-0.9": ["current"],
    "speculators-0.7": ["speculators-0.7", "current"],
    "speculators-0.3": ["speculators-0.3", "current"],
    "specforge": ["current"],
    "modelopt": ["modelopt", "current"],
}
# the same on archives, with the module that is ours on the path
ARCHIVES = {"speculators-0.9-archives": ["current"], "specforge-archives": ["current"]}


def folder(name: str) -> Path:
    """The packages of tests/readers/NAME.txt in a folder of their own, made on first use; torch and transformers are the engine's."""
    pins = PINS / f"{name}.txt"
    stamp = hashlib.sha256(pins.read_bytes() + str(PYTHON.resolve()).encode()).hexdigest()[:12]
    place = CACHE / "readers" / f"{name}-{stamp}"
    place.parent.mkdir(exist_ok=True)
    with (place.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            part = place.with_name(f".{place.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            words = [
                str(PYTHON),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--disable-pip-version-check",
                "--no-input",
            ]
            subprocess.run([*words, "--no-compile", "--target", str(part), "-r", str(pins)], check=True, timeout=300)
            part.rename(place)
    return place


def printed(reader: str, captured: Path) -> str:
    """The Python block that docs/formats.md prints for a reader, with the page's folders replaced; empty where it has none."""
    found = re.search(rf"```python\n# {re.escape(reader)}\n(.*?)```", (REPO / "docs/formats.md").read_text(), re.S)
    return found.group(1).replace("/data/hidden-states", str(captured)) if found else ""


def judged(reader: str, captured: Path, exported: Path, dataset: Path, code: Path) -> str:
    """Let a trainer's reader judge; its output. AssertionError with everything it said where it finds a fault.

    ``code``: file for the commands that the page prints, which the judge runs too.
    """
    path = os.pathsep.join(str(folder(name)) for name in {**PATHS, **ARCHIVES}[reader])
    path += f"{os.pathsep}{REPO / 'files/readers'}" if reader in ARCHIVES else ""
    words = [str(PYTHON), "-W", "ignore", str(PINS / "judge.py"), reader, str(captured), str(exported), str(dataset)]
    code.write_text(printed(reader, exported if reader in ARCHIVES else captured))
    words += [str(code)] if code.read_text() else []
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
