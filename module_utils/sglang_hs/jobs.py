"""The two jobs of a run on the target: the extraction server and the client. Both outlive the controller.

With systemd each is a unit (its file is rendered by the role); without, a process of its own session under a small supervisor that
only waits for it and writes down how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping

from . import fsio, procs, production, spawn
from .errors import HsError

UNITS = {"server": "sglang-hs-extraction.service", "client": "sglang-hs-client.service"}


class Job:
    """``server`` or ``client`` of the run in ``folder``."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.unit = UNITS[name]
        self.spec_file = folder / (name + ".job.json")
        self.state_file = folder / (name + ".state.json")
        self.log = folder / (name + ".log")
        self.environment_file = folder / (name + ".env")
        self.systemd = production.has_units()

    def prepare(self, spec: Mapping[str, Any]) -> None:
        """Write what the job is started from: argv, env, cwd, uid, gid, groups. 0600, the environment holds secrets."""
        fsio.write_json(self.spec_file, dict(spec))
        fsio.write_text(self.environment_file, environment_file(spec["env"]))
        if not self.log.exists():
            fsio.write_text(self.log, "", 0o600)
        if os.geteuid() == 0 and "uid" in spec:
            os.chown(str(self.log), int(spec["uid"]), int(spec["gid"]))

    def start(self, lib: Path) -> None:
        """Start it and let go."""
        fsio.write_json(self.state_file, {"asked": time.time()})
        if self.systemd:
            production.run(["systemctl", "start", "--no-block", self.unit], 60)
            return
        spawn.detached(
            spawn.program(lib, "supervise", str(self.spec_file)), str(self.spec_file.parent / "supervisor.log")
        )

    def state(self) -> Dict[str, Any]:
        """{asked: was it ever started, running, pid, code (exit status, None while running), ended (unix time or None)}."""
        return self._unit_state() if self.systemd else self._session_state()

    def _unit_state(self) -> Dict[str, Any]:
        """From systemd while it runs. Its end is written down when first seen: systemd forgets an ended unit as it likes."""
        found = fsio.read_json(self.state_file)
        if found is None:
            return {"asked": False, "running": False, "pid": None, "code": None, "ended": None}
        wanted = "ActiveState,Job,MainPID,ExecMainPID,ExecMainStatus,ExecMainCode,ExecMainExitTimestamp"
        words = ["systemctl", "show", "-p", wanted, "--timestamp=unix", self.unit]
        out = subprocess.run(words, stdout=subprocess.PIPE, check=False).stdout.decode()
        show = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        queued = show.get("Job", "0") not in ("", "0")
        remembered = show.get("ExecMainPID", "0") != "0"
        active = show.get("ActiveState") in ("active", "activating", "deactivating", "reloading")
        if active or queued or not (remembered or time.time() - found["asked"] > 10 or "ended" in found):
            return {
                "asked": True,
                "running": True,
                "pid": int(show.get("MainPID", "0")) or None,
                "code": None,
                "ended": None,
            }
        if "ended" not in found:
            stamp = show.get("ExecMainExitTimestamp", "").lstrip("@")
            code: Any = "unknown"
            if remembered:
                status = int(show.get("ExecMainStatus", "1"))
                code = status if show.get("ExecMainCode") == "1" else 128 + status
            found = dict(found, ended=float(stamp) if stamp.isdigit() else time.time(), code=code)
            self._keep(found)
        return {"asked": True, "running": False, "pid": None, "code": found["code"], "ended": found["ended"]}

    def _session_state(self) -> Dict[str, Any]:
        found = fsio.read_json(self.state_file)
        if found is None:
            return {"asked": False, "running": False, "pid": None, "code": None, "ended": None}
        if "pid" not in found:  # the supervisor is about to start it - unless it died on the way
            late = time.time() - found["asked"] > 20
            return {
                "asked": True,
                "running": not late,
                "pid": None,
                "code": 127 if late else None,
                "ended": found["asked"] + 20 if late else None,
            }
        running = procs.alive(found["pid"], found["start"])
        ended = found.get("ended")
        code = found.get("code")
        if not running and ended is None:
            if procs.alive(found["supervisor"], found["supervisor_start"]):
                running = True  # ended this very moment; its supervisor is about to write so
            else:
                ended, code = time.time(), 137  # killed together with its supervisor
                self._keep(dict(found, ended=ended, code=code))
        return {
            "asked": True,
            "running": running,
            "pid": found["pid"],
            "code": None if running else code,
            "ended": None if running else ended,
        }

    def _keep(self, found: Mapping[str, Any]) -> None:
        """Write an end down. On a full disk it is not: whoever only asks how the job is doing must get an answer all the same."""
        with contextlib.suppress(OSError):
            fsio.write_json(self.state_file, dict(found))

    def members(self) -> List[procs.Process]:
        """Living processes of the job; without systemd the main process first."""
        if self.systemd:
            return [process for process in procs.everyone() if procs.unit_of(process.pid) == self.unit]
        found = fsio.read_json(self.state_file) or {}
        if "pid" not in found:
            return []
        table = procs.everyone()
        family = procs.family(found["pid"], table) if procs.alive(found["pid"], found["start"]) else []
        # its own session was made for it alone: whoever is left there is its own, also after the main process died
        left = [
            process
            for process in table
            if process.session == found["pid"] and process.start >= found["start"] and process not in family
        ]
        return family + left

    def stop(self, patience: float) -> bool:
        """Stop it; whether there was anything to stop."""
        if self.systemd:
            if not self._unit_state()["running"]:
                return False
            try:
                production.run(["systemctl", "stop", self.unit], patience + 90)
            except HsError:
                known = production.run(["systemctl", "show", "-p", "LoadState", "--value", self.unit], 60)
                if known != "not-found":  # a unit that was never loaded has nothing to stop
                    raise
                return False
            return True
        until = time.monotonic() + 5
        while (fsio.read_json(self.state_file) or {"pid": 0}).get("pid") is None and time.monotonic() < until:
            time.sleep(0.1)  # asked for a moment ago
        found = self.members()
        if not found:
            return False
        procs.end(found, patience)
        left = self.members()
        if left:
            procs.end(left, 0)
        left = self.members()
        if left:
            raise HsError(
                "{} of the extraction {}'s processes do not end, first {}".format(
                    len(left), self.name, left[0].describe()
                )
            )
        return True


def environment_file(env: Mapping[str, str]) -> str:
    """``env`` in the syntax of systemd's EnvironmentFile= (systemd.exec(5)): double quotes, with ``\\``, ``"``, `````, ``$`` escaped."""
    lines = []
    for key in sorted(env):
        if not key.replace("_", "a").isalnum() or key[0].isdigit():
            continue  # exported shell functions and the like: systemd would not take the line either
        text = "".join("\\" + letter if letter in '\\"`$' else letter for letter in env[key])
        lines.append('{}="{}"'.format(key, text))
    return "\n".join(lines) + "\n"


def supervise(spec_file: Path) -> int:
    """Start the job of ``spec_file`` in a session of its own, wait for its end and write down how it ended."""
    spec = json.loads(spec_file.read_text())
    name = spec_file.name.partition(".")[0]
    job = Job(name, spec_file.parent)
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # a handler: SIG_IGN would be inherited
    process = spawn.detached(spec, str(job.log))
    me = procs.read(os.getpid())
    state = {
        "pid": process.pid,
        "start": process.start,
        "supervisor": os.getpid(),
        "supervisor_start": me.start if me else 0,
        "asked": time.time(),
    }
    try:
        fsio.write_json(job.state_file, state)
    except OSError:  # a full disk: a server that nobody knows of could not be stopped any more
        procs.end(procs.family(process.pid), 5)
        raise
    _, status = os.waitpid(process.pid, 0)
    code = (
        os.waitstatus_to_exitcode(status)
        if sys.version_info >= (3, 9)
        else (status >> 8 if status & 0x7F == 0 else -(status & 0x7F))
    )
    job._keep(dict(state, ended=time.time(), code=code if code >= 0 else 128 - code))
    return 0


def shown(argv: List[str]) -> str:
    """A command, one option a line, for diffs and plans."""
    lines: List[str] = []
    for word in argv:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return "\n".join(lines) + "\n"
