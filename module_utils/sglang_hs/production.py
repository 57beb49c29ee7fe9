"""The server that earns the money: found, recorded, stopped without harm, started exactly so again, judged by its answers.

Three kinds: a systemd unit; a pair of start/stop commands; a bare process, *adopted* - its argv, environment, folder and user
are read from /proc before it is stopped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

from . import command, ending, fsio, gpus, procs, server, spawn
from .errors import HsError
from .journal import Paths

# What people and their jobs come in by. Where no session manager puts a login into a scope of its own, whatever it starts stays there.
LOGIN_UNITS = re.compile(r"(sshd?|cron|crond|atd|getty|serial-getty|systemd-logind|dropbear)(@.*)?\.service$")
UNTOUCHED = "everything: production was not touched"


def has_systemd() -> bool:
    """Whether systemd manages this host (sd_booted(3))."""
    return os.path.isdir("/run/systemd/system")


def has_units() -> bool:
    """Whether our jobs and the guard are units: with systemd, and as root. Anyone else gets sessions, as on a host without systemd."""
    return has_systemd() and os.geteuid() == 0


def ended_by_logout() -> bool:
    """Whether logind ends everything that this user started when their last connection closes (KillUserProcesses in logind.conf)."""
    if not has_systemd() or os.geteuid() == 0:
        return False
    words = ["busctl", "--json=short", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"]
    words += ["org.freedesktop.login1.Manager", "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers"]
    try:
        kills, only, spared = (json.loads(line)["data"] for line in run(words, 20).splitlines())
    except (HsError, ValueError, KeyError, TypeError):
        return False  # no logind
    me = procs.user_name(os.geteuid())
    return bool(kills) and me not in spared and (not only or me in only)


def run(argv: Sequence[str], patience: float) -> str:
    """Run a command to its end; its output. Raises HsError with what it said."""
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=patience,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HsError("{} did not work: {}".format(" ".join(argv), error)) from error
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0:
        raise HsError("{} ended with status {}: {}".format(" ".join(argv), done.returncode, text[-500:]))
    return text


def find(settings: Mapping[str, Any], port: int) -> Optional[procs.Process]:
    """The process that listens on production's port, or None. Raises HsError where it may not be looked at."""
    found = procs.listeners(port)
    if not found:
        return None
    if found[0].process is None:
        raise HsError(
            "somebody else's process listens on port {}".format(port),
            UNTOUCHED,
            "run as the user that runs production, or as root (ansible_become: true in the inventory)",
        )
    return found[0].process


def url_of(port: int, address: str) -> str:
    """Where production answers from this host itself."""
    if address in ("0.0.0.0", "::"):
        address = "127.0.0.1"
    return "http://{}:{}".format("[{}]".format(address) if ":" in address else address, port)


def take(settings: Mapping[str, Any], api_key: str = "") -> Dict[str, Any]:
    """Production's record: how it runs now and how it is started again.

    Keys: kind (systemd, command, process), unit, start, stop, port, url, api_key, expected (running, stopped) and what
    :func:`procs.adoption` reads of the running process. Raises HsError when it is not as the operator said.
    """
    port = int(settings["production_port"])
    expected = settings["production_expected"]
    process = find(settings, port)
    record: Dict[str, Any] = {
        "port": port,
        "expected": expected,
        "start_command": list(settings["production_start"]),
        "stop_command": list(settings["production_stop"]),
    }
    if process is None:
        if expected == "running":
            raise HsError(
                "production does not run: nobody listens on port {}".format(port),
                UNTOUCHED,
                "start it, or correct hs_production_port; if it is down on purpose, say so with hs_production_expected=stopped (it will stay down)",
            )
        record.update(_down_on_purpose(settings, port))
    else:
        if expected == "stopped":
            raise HsError(
                "hs_production_expected is stopped, yet {} listens on port {}".format(process.describe(), port),
                UNTOUCHED,
                "set hs_production_expected=running",
            )
        try:
            record.update(procs.adoption(process))
        except PermissionError as error:
            raise HsError(
                "cannot read how production was started ({}): it is {}".format(error, process.describe()),
                UNTOUCHED,
                "run as that user, or as root (ansible_become: true in the inventory)",
            ) from error
        record["url"] = url_of(port, procs.listeners(port)[0].address)
        if record["unit"] and (LOGIN_UNITS.match(record["unit"]) or record["unit"] == procs.unit_of(os.getpid())):
            record["unit"] = None  # started by hand over ssh, or by cron: stopping that unit would stop something else
    record["gpu_baseline"] = gpus.baseline({one.pid for one in members(record)})
    record["kind"] = _kind(settings, record)
    if record["kind"] == "systemd":
        record["unit"] = settings["production_unit"] or record["unit"]
    record["api_key"] = api_key or command.value(record["argv"], "--api-key") or ""
    return record


def _down_on_purpose(settings: Mapping[str, Any], port: int) -> Dict[str, Any]:
    """How production would run: as the operator says, else as the last run on this host saw it."""
    kept = fsio.read_json(Paths(settings["state_dir"]).production) or {}
    argv = [str(word) for word in settings["production_argv"]]
    seen = {} if argv or kept.get("port") != port else kept
    if not argv and not seen.get("argv"):
        raise HsError(
            "production is down on purpose, and no run has seen it on this host: its command line is not known",
            UNTOUCHED,
            "give it as a list of words in hs_production_argv (its environment, where it needs one, in hs_extraction_env)",
        )
    mine: Dict[str, Any] = {
        "argv": argv,
        "env": dict(os.environ),
        "cwd": "/",
        "uid": os.geteuid(),
        "gid": os.getegid(),
        "groups": os.getgroups(),
    }
    keys = ("argv", "env", "cwd", "exe", "uid", "gid", "groups", "umask", "limits", "stdout", "stderr", "unit")
    mine.update({key: seen[key] for key in keys if key in seen})
    return dict(mine, pid=None, start=None, unit=mine.get("unit"), url=url_of(port, "127.0.0.1"))


def _kind(settings: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """How production is started and stopped; ``auto`` decides from what is seen."""
    kind = settings["production_kind"]
    if kind == "auto":
        if record["start_command"]:
            return "command"
        kind = "systemd" if has_systemd() and (settings["production_unit"] or record.get("unit")) else "process"
    if kind == "systemd" and not (settings["production_unit"] or record.get("unit")):
        raise HsError(
            "production listens on port {} but belongs to no systemd unit".format(record["port"]),
            UNTOUCHED,
            "set hs_production_unit, or hs_production_kind=process to adopt it as it runs",
        )
    if kind == "systemd" and os.geteuid() != 0:
        raise HsError(
            "production is the unit {}, which {} may not stop and start".format(
                settings["production_unit"] or record.get("unit"), procs.who_am_i()
            ),
            UNTOUCHED,
            "run as root (ansible_become: true in the inventory)",
        )
    if (
        kind == "systemd"
        and record.get("pid")
        and settings["production_unit"]
        and record.get("unit") != settings["production_unit"]
    ):
        raise HsError(
            "the server on port {} belongs to {}, not to {}".format(
                record["port"], record.get("unit") or "no unit", settings["production_unit"]
            ),
            UNTOUCHED,
            "correct hs_production_unit or hs_production_port",
        )
    if kind == "command" and not (record["start_command"] and record["stop_command"]):
        raise HsError(
            "hs_production_kind is command, but its commands are not given",
            UNTOUCHED,
            "set hs_production_start and hs_production_stop, each a list of words",
        )
    return str(kind)


def summary(record: Mapping[str, Any]) -> str:
    """Production and how it comes back, in one line without secrets."""
    how = {
        "systemd": "systemctl start {}".format(record.get("unit")),
        "command": " ".join(record["start_command"]),
        "process": "the same argv, environment, folder and user",
    }[record["kind"]]
    if record["expected"] == "stopped":
        return "down on purpose; it stays down"
    return "pid {} on {}, {}; it comes back by {}".format(
        record["pid"],
        record["url"],
        {
            "systemd": "unit {}".format(record["unit"]),
            "command": "started by commands",
            "process": "a process started by hand",
        }[record["kind"]],
        how,
    )


def members(record: Mapping[str, Any]) -> List[procs.Process]:
    """The recorded server's living processes, main process first; empty when it is gone."""
    if not record.get("pid") or not procs.alive(int(record["pid"]), int(record["start"])):
        return []
    return procs.family(int(record["pid"]))


def stop(record: Mapping[str, Any], patience: float) -> List[str]:
    """Stop production: what was done, line by line. Ends with port free, processes gone, GPU memory back.

    TERM to the main process, ``patience`` seconds, then KILL within its own family or cgroup alone.
    """
    said: List[str] = []
    family = members(record)
    if family:
        if record["kind"] == "systemd":
            run(["systemctl", "stop", record["unit"]], patience + 120)
            said.append("systemctl stop {}".format(record["unit"]))
        elif record["kind"] == "command":
            run(record["stop_command"], patience)
            said.append(" ".join(record["stop_command"]))
            if spawn.wait_gone(family, patience):
                raise HsError("the stop command ended, yet production still runs: {}".format(family[0].describe()))
        else:
            killed = procs.end(family, patience)
            said.append(
                "TERM to pid {}{}".format(
                    record["pid"],
                    "; after {:.0f} s KILL to {} of its processes".format(patience, len(killed)) if killed else "",
                )
            )
    wait_released(family, int(record["port"]), patience, record.get("gpu_baseline"))
    return said


def wait_released(
    family: List[procs.Process], port: Optional[int], patience: float, baseline: Optional[Mapping[str, int]] = None
) -> None:
    """Wait until the processes are gone, the GPUs have forgotten them and their memory is back, and ``port`` (if any) is free.

    ``baseline``: MiB that each GPU has in use without them (:func:`gpus.baseline`). Raises HsError that names what is in the way.
    """
    until = time.monotonic() + patience
    pids = {process.pid for process in family}
    while True:
        living = [process for process in family if procs.alive(process.pid, process.start)]
        holders = procs.listeners(port) if port is not None and not living else []
        on_gpu = [pid for _, pid, _ in gpus.users() if pid in pids]
        kept = gpus.not_given_back(baseline or {})
        if not (living or holders or on_gpu or kept):
            return
        if time.monotonic() > until:
            if living:
                raise HsError(
                    "{} of production's processes are still there, first {}".format(len(living), living[0].describe())
                )
            if holders:
                who = holders[0].process.describe() if holders[0].process else "a process that we may not see"
                raise HsError(
                    "port {} is held by {}".format(port, who),
                    "it: a stranger's process is never killed",
                    "end it, or ask its owner",
                )
            if on_gpu:
                raise HsError(
                    "the driver still counts pids {} on the GPUs".format(on_gpu), next="look at nvidia-smi and dmesg"
                )
            strangers = [procs.read(pid) for pid in gpus.strangers(pids)]
            raise HsError(
                "{}; on the GPUs now: {}".format(
                    "; ".join(kept), "; ".join(one.describe() for one in strangers if one) or "nobody that we may see"
                ),
                "a stranger's process is never killed",
                "ask its owner to end it; with nobody there look at nvidia-smi and dmesg",
            )
        time.sleep(0.2)


def running(record: Mapping[str, Any]) -> Optional[procs.Process]:
    """The server on production's port, if it was started as recorded (same argv); None otherwise."""
    found = procs.listeners(int(record["port"]))
    process = found[0].process if found else None
    return process if process is not None and process.argv == list(record["argv"]) else None


def start(record: Mapping[str, Any], log: Path) -> Optional[procs.Process]:
    """Start production as recorded; a server that already runs as recorded is left alone. ``log``: for a server without a log file."""
    if record["kind"] == "systemd":
        run(["systemctl", "reset-failed", record["unit"]], 60)
        run(["systemctl", "start", "--no-block", record["unit"]], 60)
        return None
    if record["kind"] == "command":
        run(record["start_command"], 600)
        return None
    process = spawn.detached(record, record.get("stdout") or record.get("stderr") or str(log))
    _own_scope(process)
    return process


def _own_scope(process: procs.Process) -> None:
    """Give an adopted server a scope of its own, so that it belongs neither to the guard's unit nor to a login session.

    By StartTransientUnit with the pid, not by systemd-run, which would add to the environment. Best effort: without it the
    server serves all the same.
    """
    if not has_units():
        return
    name = "sglang-production-{}.scope".format(process.pid)
    words = [
        "busctl",
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
    ]
    words += ["StartTransientUnit", "ssa(sv)a(sa(sv))", name, "fail", "1", "PIDs", "au", "1", str(process.pid), "0"]
    try:
        run(words, 20)
    except HsError as error:
        print(error)


def gone_reason(record: Mapping[str, Any], process: Optional[procs.Process]) -> Optional[str]:
    """Why a starting production cannot come any more (it died), or None while it may."""
    if record["kind"] == "systemd":
        words = ["systemctl", "show", "-p", "ActiveState,Job", record["unit"]]
        text = subprocess.run(words, stdout=subprocess.PIPE, check=False).stdout.decode()
        show = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        # a unit whose start is still in systemd's queue is inactive too
        if show.get("ActiveState") in ("failed", "inactive") and show.get("Job", "0") in ("", "0"):
            return "unit {0} is {1}; journalctl -u {0} tells why".format(record["unit"], show["ActiveState"])
        return None
    if process is not None and not procs.alive(process.pid, process.start):
        log = Path(record.get("stdout") or record.get("stderr") or os.devnull)
        return "the server ended while starting: {}. Its log: {}".format(ending.why_ended(log), log)
    return None


def wait(record: Mapping[str, Any], process: Optional[procs.Process], patience: float) -> None:
    """Wait until production gives real generations; HsError with the reason when it does not."""
    reasons = server.wait_healthy(
        record["url"], record.get("api_key", ""), patience, lambda: gone_reason(record, process)
    )
    if reasons:
        raise HsError("production does not answer: {}".format(reasons[0]))
