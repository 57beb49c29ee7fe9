"""The demo's production server: started by hand, looked at, ended. Uses the project's own eyes on processes and servers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "module_utils"))

from sglang_hs import fsio, procs, server


def start(folder: Path, port: int) -> int:
    """Start ``production.sh`` unless a server answers on ``port`` already."""
    url = f"http://127.0.0.1:{port}"
    found = procs.listeners(port)
    if found and found[0].process and str(folder) not in found[0].process.command:
        print(
            f"port {port} is taken by {found[0].process.describe()}; set HS_LOCAL_PORT to a free one", file=sys.stderr
        )
        return 1
    if not found:
        with open(folder / "production.log", "ab") as log:
            process = subprocess.Popen(
                [str(folder / "production.sh")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        print(f"setsid {folder}/production.sh >> {folder}/production.log &   (pid {process.pid})")
    until = time.monotonic() + 300
    while server.healthy(url) is not None:
        if not found and process.poll() is not None:
            print(f"production ended with status {process.returncode}; see {folder}/production.log", file=sys.stderr)
            return 1
        if time.monotonic() > until:
            print(f"production does not answer; see {folder}/production.log", file=sys.stderr)
            return 1
        time.sleep(0.5)
    print(f"production answers on {url}")
    return 0


def check(port: int) -> int:
    """Ask for real generations."""
    reason = server.healthy(f"http://127.0.0.1:{port}")
    print("production answers" if reason is None else f"production does not answer: {reason}")
    return 0 if reason is None else 1


def stop(port: int, folder: Path) -> int:
    """End the demo's server, and nobody else's."""
    found = procs.listeners(port)
    if not found or found[0].process is None:
        print("production does not run")
        return 0
    if str(folder) not in found[0].process.command:
        print(f"port {port} belongs to {found[0].process.describe()}: not the demo's, left alone", file=sys.stderr)
        return 1
    procs.end(procs.family(found[0].process.pid), 20)
    print("production is stopped")
    return 0


def wait_for_restore(state: Path) -> int:
    """A restore that has begun is waited for; a run that merely lost its watcher is left to extract.yml."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        journal = fsio.read_json(state / "journal.json")
        if journal is None or not any(record["step"] == "restore" for record in journal["steps"]):
            return 0
        time.sleep(0.5)
    print("the restore does not end; see ansible-playbook playbooks/restore.yml -i inventory/local", file=sys.stderr)
    return 1


def own_time(state: Path, wall: float) -> int:
    """Print what extract.yml took for itself: ``wall`` seconds less loading two models and extracting the data, from the journal."""
    run = max((state / "runs").iterdir(), key=lambda path: path.name)
    at = {(step["step"], step["state"]): step["at"] for step in fsio.read_json(run / "journal.json")["steps"]}
    spans = {
        name: at[(step, "done")] - at[(step, "begun")]
        for name, step in (
            ("extraction server's load", "launch"),
            ("canary and data", "extract"),
            ("production's load", "restore: check production"),
            ("stopping production", "stop"),
            ("stopping the extraction", "restore: stop extraction"),
        )
    }
    own = wall - sum(spans[name] for name in ("extraction server's load", "canary and data", "production's load"))
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spans.items())
    print(f"extract.yml took {wall:.0f} s: {told}; its own time, without loads and data, {own:.1f} s")
    return 0


def main(words: list[str]) -> int:
    """start DIR PORT | check PORT | stop DIR PORT | wait-for-restore STATE_DIR | own-time STATE_DIR SECONDS"""
    verb, rest = words[0], words[1:]
    if verb == "start":
        return start(Path(rest[0]), int(rest[1]))
    if verb == "check":
        return check(int(rest[0]))
    if verb == "stop":
        return stop(int(rest[1]), Path(rest[0]))
    if verb == "wait-for-restore":
        return wait_for_restore(Path(rest[0]))
    if verb == "own-time":
        return own_time(Path(rest[0]), float(rest[1]))
    print(main.__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
