"""Runs on the host, by ssh: everything that must be after a run as it was before it, as one JSON document on standard output.

look.py SOURCE OUTPUT: SOURCE is the engine's package folder, OUTPUT the folder of the samples.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

PORT = 30000
STATE = Path("/var/lib/sglang-hs")
OURS = ("sglang_hs", "sglang-hs", "31000")  # what a process of ours has in its command line
RUN_BY_SYSTEMD = (
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "SYSTEMD_EXEC_PID",
    "MEMORY_PRESSURE_WATCH",
    "MEMORY_PRESSURE_WRITE",
)


def sha(path: Path) -> str:
    """Hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def said(*words: str) -> str:
    """Standard output of a command."""
    return subprocess.run(words, stdout=subprocess.PIPE, check=False, text=True).stdout


def production() -> dict[str, object]:
    """The unit's main process: argv and environment, without what systemd gives each start anew."""
    pid = int(said("systemctl", "show", "-p", "MainPID", "--value", "sglang.service").strip() or 0)
    if not pid:
        return {"argv": [], "environment": {}}
    folder = Path("/proc", str(pid))
    try:
        argv = folder.joinpath("cmdline").read_bytes().decode().split("\0")[:-1]
        pairs = (word.partition("=") for word in folder.joinpath("environ").read_bytes().decode().split("\0") if word)
        return {"argv": argv, "environment": {key: word for key, _, word in pairs if key not in RUN_BY_SYSTEMD}}
    except OSError:
        return {"argv": [], "environment": {}}


def generates(patience: float = 0.0) -> str:
    """A real generation of production, as text; what it said instead where there is none."""
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}).encode()
    until = time.monotonic() + patience
    while True:
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{PORT}/generate", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                return str(json.load(answer)["output_ids"])
        except (OSError, ValueError, KeyError) as error:
            if time.monotonic() > until:
                return f"no answer: {error}"
            time.sleep(0.5)


def ours() -> list[str]:
    """Command lines of processes that belong to a run."""
    found = []
    mine = {os.getpid(), os.getppid()}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in mine:
            continue
        try:
            line = entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if any(word in line for word in OURS) and "AnsiballZ" not in line:
            found.append(line[:200])
    return sorted(found)


def units() -> list[str]:
    """Units, timers and unit files of a run."""
    loaded = [
        line.split()[0]
        for line in said("systemctl", "list-units", "--all", "--plain", "--no-legend", "sglang-hs*").splitlines()
        if line.strip()
    ]
    files = [
        str(path)
        for folder in ("/run/systemd/system", "/etc/systemd/system")
        for path in Path(folder).rglob("sglang-hs*")
    ]
    return sorted(loaded + files)


def units_left(patience: float) -> list[str]:
    """:func:`units`, which go last: the run is closed before."""
    until = time.monotonic() + patience
    while (found := units()) and time.monotonic() < until:
        time.sleep(0.5)
    return found


def tree(source: Path) -> dict[str, str]:
    """Hash of each file of the engine, byte code aside."""
    return {
        str(path.relative_to(source)): sha(path)
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def samples(output: Path) -> dict[str, object]:
    """Accepted samples, and those of them that are not there with the bytes of their record."""
    book = output / "manifest.sqlite"
    # on a full disk the client came no further than to an empty file
    if not book.exists() or not sqlite3.connect(book).execute("SELECT 1 FROM sqlite_master").fetchone():
        return {"accepted": 0, "wrong": [], "stray": sorted(path.name for path in output.rglob("*.tmp*"))}
    rows = sqlite3.connect(book).execute("SELECT idx, file, bytes, sha256 FROM samples WHERE state = 'done'").fetchall()
    wrong = []
    for idx, file, size, digest in rows:
        path = output / file
        if not path.exists() or path.stat().st_size != size or sha(path) != digest:
            wrong.append(idx)
    return {"accepted": len(rows), "wrong": wrong, "stray": sorted(path.name for path in output.rglob("*.tmp*"))}


def main() -> None:
    """Print the document."""
    source, output = Path(sys.argv[1]), Path(sys.argv[2])
    patience = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    closed = sorted(STATE.glob("runs/*/journal.json"))
    print(
        json.dumps(
            {
                "production": production(),
                "generates": generates(patience),
                "ours": ours(),
                "units": units_left(min(patience, 30.0)),
                "tree": tree(source),
                "shm": sorted(os.listdir("/dev/shm")),
                "state": sorted(path.name for path in STATE.iterdir()) if STATE.is_dir() else [],
                "backup": sorted(path.name for path in STATE.glob("backup/*")),
                "samples": samples(output),
                "closed": (json.loads(closed[-1].read_text()).get("closed") or {}) if closed else {},
            }
        )
    )


if __name__ == "__main__":
    main()
