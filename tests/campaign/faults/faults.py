"""What goes wrong: how it is done to the host or its controller, and how it is mended where only a person can mend it.

A fault is done at a moment (moments.py). ``setup`` comes at an earlier one, for what must be there when the step begins. After the
strike nobody does anything until the run is closed or the controller has said what it waits for; then ``mend``, where there is one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .host import OUTPUT, STATE, FaultHost
from .moments import FORWARD, RESTORE, STEPS

EXTRACT, RESTORE_BOOK = "playbooks/extract.yml", "playbooks/restore.yml"
UNIT, SERVER, CLIENT = "sglang.service", "sglang-hs-extraction.service", "sglang-hs-client.service"


@dataclass
class Strike:
    """One fault at one step, and what it leaves behind for the judge."""

    host: FaultHost
    step: str
    fault: str
    playing: subprocess.Popen[bytes] | None = None
    undo: list[Callable[[], object]] = field(default_factory=list)
    expect_tree: str = ""  # "edited" or "upgraded": the model file is somebody's new one, and stays so
    others: list[tuple[str, subprocess.Popen[bytes], Path]] = field(default_factory=list)  # further playbooks
    notes: list[str] = field(default_factory=list)

    def unit_setting(self, unit: str, section: str, line: str) -> None:
        """A drop-in for a unit, gone with the mending (and, in /run, with a reboot)."""
        folder = f"/run/systemd/system/{unit}.d"
        self.host.inside(
            f"mkdir -p {folder} && printf '[{section}]\\n{line}\\n' > {folder}/fault.conf && systemctl daemon-reload"
        )
        self.undo.append(lambda: self.host.inside(f"rm -rf {folder}; systemctl daemon-reload"))

    def read_only(self, folder: str) -> None:
        """A folder that can no longer be written to."""
        self.host.inside(f"mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}")
        self.undo.append(lambda: self.host.inside(f"umount {folder} 2>/dev/null || true"))

    def main_pid(self, unit: str) -> int:
        """Of a unit, inside."""
        return int(self.host.inside(f"systemctl show -p MainPID --value {unit}").strip() or 0)

    def signal_unit(self, unit: str, number: str, whom: str = "all") -> None:
        """A signal to a unit's processes."""
        self.host.inside(f"systemctl kill --kill-whom={whom} --signal={number} {unit}")

    def freeze(self, script: str) -> None:
        """Stop the processes whose pids ``script`` prints, as one that hangs; they go on with the mending."""
        until = time.monotonic() + 20
        while True:
            pids = self.host.inside(script).split()
            if pids:
                break
            if time.monotonic() > until:
                raise RuntimeError(f"nothing to freeze: {script}")
        self.host.inside(f"kill -STOP {' '.join(pids)}")
        self.undo.append(lambda: self.host.inside(f"kill -CONT {' '.join(pids)} 2>/dev/null || true"))

    @property
    def models(self) -> str:
        """The folder of the edited file, inside."""
        return f"{self.host.source}/srt/models"


# Ansible's modules run below sshd: the python processes whose session came in by ssh.
MODULES = (
    "for p in $(pgrep -x 'python3|python3.11|python'); do q=$p; while [ \"$q\" -gt 1 ]; do "
    "q=$(ps -o ppid= -p $q | tr -d ' '); [ -n \"$q\" ] || break; "
    "case $(ps -o comm= -p $q) in sshd*) echo $p; break;; esac; done; done"
)
HOLDER = f"python3 -c \"import json; print(json.load(open('{STATE}/.restore'))['pid'])\" 2>/dev/null || true"


@dataclass(frozen=True)
class Fault:
    """``name`` as it stands in the table; ``settings``: more variables for extract.yml; ``instead``: by step, why there is no such cell."""

    name: str
    told: str
    strike: Callable[[Strike], None]
    setup: Callable[[Strike], None] | None = None  # comes when the step before this one is at work
    instead: dict[str, str] = field(default_factory=dict)  # step: why there is no such cell
    settings: dict[str, object] = field(default_factory=dict)
    own_play: Callable[[Strike], tuple[str, tuple[str, ...]]] | None = (
        None  # another playbook than extract.yml as it is
    )


def nothing(strike: Strike) -> None:
    """All was done before."""


# -- a step fails ---------------------------------------------------------------------------------------------------------


def _fails_setup(strike: Strike) -> None:
    """What makes the step itself fail when it comes."""
    if strike.step == "lock":  # the guard's unit cannot be written: production must not be stopped then
        folder = "/etc/systemd/system/sglang-hs-guard.service"
        strike.host.inside(f"mkdir -p {folder}/kept")
        strike.undo.append(lambda: strike.host.inside(f"rm -rf {folder}"))
    elif strike.step == "patch":
        strike.read_only(strike.models)
    elif strike.step == "stop":
        strike.unit_setting(UNIT, "Unit", "RefuseManualStop=yes")
    elif strike.step == "stop extraction":
        strike.unit_setting(SERVER, "Unit", "RefuseManualStop=yes")
    elif strike.step == "free GPUs":
        tool = "/usr/local/bin/nvidia-smi"
        strike.host.inside(
            f"mv {tool} {tool}.kept; printf '#!/bin/sh\\necho driver mismatch; exit 9\\n' > {tool}; chmod +x {tool}"
        )
        strike.undo.append(lambda: strike.host.inside(f"mv {tool}.kept {tool}"))
    elif strike.step == "restore source":
        strike.read_only(strike.models)
    elif strike.step == "start production":
        strike.unit_setting(UNIT, "Unit", "RefuseManualStart=yes")
    elif strike.step == "disarm":
        strike.read_only("/etc/systemd/system")


def _fails(strike: Strike) -> None:
    if strike.step == "launch":
        strike.signal_unit(SERVER, "KILL")
    elif strike.step in ("canary", "extract"):
        strike.host.inside("pkill -KILL -f '[s]glang::scheduler' || true")  # the brackets: not the shell that says it
    elif strike.step == "check production":
        until = time.monotonic() + 30
        while not strike.main_pid(UNIT) and time.monotonic() < until:
            time.sleep(0.2)
        strike.signal_unit(UNIT, "STOP")
        strike.undo.append(lambda: strike.signal_unit(UNIT, "CONT"))


# -- a step hangs ---------------------------------------------------------------------------------------------------------


def _hangs(strike: Strike) -> None:
    if strike.step in ("lock", "patch", "stop"):
        strike.freeze(MODULES)
    elif strike.step in ("launch", "canary", "extract"):
        strike.signal_unit(SERVER, "STOP")
        strike.undo.append(lambda: strike.host.inside(f"systemctl kill --signal=CONT {SERVER} 2>/dev/null || true"))
    else:
        strike.freeze(HOLDER)


# -- the controller goes away ---------------------------------------------------------------------------------------------


def _signal(number: signal.Signals, group: bool) -> Callable[[Strike], None]:
    def strike(strike: Strike) -> None:
        assert strike.playing is not None
        if strike.playing.poll() is None:
            (os.killpg if group else os.kill)(strike.playing.pid, number)

    return strike


# -- the link, the power --------------------------------------------------------------------------------------------------


def _cut(seconds: float) -> Callable[[Strike], None]:
    def strike(strike: Strike) -> None:
        strike.host.rig("cut", strike.host.name)
        if seconds:
            timer = threading.Timer(seconds, lambda: strike.host.rig("heal", strike.host.name))
            timer.start()
            strike.undo.append(timer.join)
        else:
            strike.undo.append(lambda: strike.host.rig("heal", strike.host.name))

    return strike


def _reboot(strike: Strike) -> None:
    strike.host.rig("reboot", "--hard", strike.host.name)


# -- full disks -----------------------------------------------------------------------------------------------------------


def _full(place: str) -> Callable[[Strike], None]:
    def strike(strike: Strike) -> None:
        strike.host.inside(f"dd if=/dev/zero of={place}/stranger.bin bs=64k 2>/dev/null || true")
        strike.undo.append(lambda: strike.host.inside(f"rm -f {place}/stranger.bin"))

    return strike


# -- somebody else's hand on the engine -----------------------------------------------------------------------------------


def _by_hand(strike: Strike) -> None:
    """A colleague's line. Beside our block the restore refuses to choose: production is back, and the colleague takes it out again."""
    file = f"{strike.models}/deepseek_v2.py"
    strike.host.inside(f"echo '# a note by a colleague' >> {file}")
    if strike.step in ("lock", "patch"):
        strike.expect_tree = "edited"  # before the edit: the file as the colleague left it is what comes back
    else:
        strike.undo.append(lambda: strike.host.inside(f"sed -i '/^# a note by a colleague$/d' {file}"))


def _upgraded(strike: Strike) -> None:
    """As pip does it: a new file in the place of the old one."""
    strike.expect_tree = "upgraded"
    kept, new = f"{strike.models}/deepseek_v2.py", "/var/tmp/upgraded.py"
    strike.host.inside(
        f"cp -p {new} {strike.models}/.pip && mv {strike.models}/.pip {kept} && rm -f {strike.models}/__pycache__/deepseek_v2.*"
    )


# -- strangers ------------------------------------------------------------------------------------------------------------


def _gpu(strike: Strike) -> None:
    strike.host.inside(
        "systemd-run --quiet --unit=stranger sleep 1200; systemctl show -p MainPID --value stranger > /run/gpu-strangers"
    )
    strike.undo.append(lambda: strike.host.inside("systemctl stop stranger 2>/dev/null; rm -f /run/gpu-strangers"))


_GRAB = (
    "import socket,sys,time\n"
    "s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
    "while True:\n"
    "    try: s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen(); break\n"
    "    except OSError: time.sleep(0.002)\n"
    "time.sleep(1200)\n"
)


def _port(strike: Strike) -> None:
    """The extraction's port before the launch; production's as soon as it is free after that."""
    port = 31000 if strike.step in ("lock", "patch", "stop") else 30000
    place = strike.host.tree / "root/var/tmp/grab.py"
    place.write_text(_GRAB)
    strike.host.inside(f"systemd-run --quiet --unit=stranger python3 /var/tmp/grab.py {port}")
    strike.undo.append(lambda: strike.host.inside("systemctl stop stranger 2>/dev/null || true"))


def _second(strike: Strike) -> None:
    """Another operator wants to extract, then to restore, while the run goes on."""

    def come() -> None:
        for book in (EXTRACT, RESTORE_BOOK):
            log = strike.host.folder / f"other-{Path(book).stem}.log"
            other = strike.host.begin(book, *strike.host.settings, "-e", "hs_operator=somebody@elsewhere", log=log)
            other.wait()
            strike.others.append((book, other, log))

    thread = threading.Thread(target=come)
    thread.start()
    strike.undo.append(thread.join)


# -- other ways to start it -----------------------------------------------------------------------------------------------

TAG = {"lock": "arm", "patch": "patch", "stop": "stop", "launch": "launch", "canary": "extract", "extract": "extract"}
FIRST_TASK = {
    "lock": "restore_production : Arm | install the restore program and what runs beside the engine",
    "patch": "backup_and_patch : Back up the engine's source and edit it",
    "stop": "stop_server : Stop production",
    "launch": "launch_extraction_server : Start the extraction server",
    "canary": "run_extraction : Start the extraction",
    "extract": "run_extraction : Watch the canary and the extraction",
}
ROLE = {
    "lock": "restore_production",
    "patch": "backup_and_patch",
    "stop": "stop_server",
    "launch": "launch_extraction_server",
    "canary": "run_extraction",
    "extract": "run_extraction",
}


def _tagged(strike: Strike) -> tuple[str, tuple[str, ...]]:
    return EXTRACT, ("--tags", TAG.get(strike.step, "restore"))


def _started_at(strike: Strike) -> tuple[str, tuple[str, ...]]:
    return EXTRACT, ("--start-at-task", FIRST_TASK.get(strike.step, "restore_production : Call the restore program"))


def _checked(strike: Strike) -> tuple[str, tuple[str, ...]]:
    return EXTRACT, ("--check", "--diff")


def _twice(strike: Strike) -> tuple[str, tuple[str, ...]]:
    """extract.yml with the step's block of tasks twice."""
    role = ROLE.get(strike.step, "restore_production")
    lines = Path(EXTRACT).resolve().read_text().splitlines(keepends=True)
    blocks: list[list[str]] = []
    for line in lines:
        if line.lstrip().startswith("- name:") or not blocks:
            blocks.append([])
        blocks[-1].append(line)
    wanted = "tasks_from: arm" if strike.step == "lock" else f"name: {role}\n"
    text = ""
    for block in blocks:
        body = "".join(block)
        again = wanted in body and not (role == "restore_production" and strike.step != "lock" and "tasks_from" in body)
        cut = body
        for heading in ("      rescue:\n", "      always:\n"):
            cut = cut.partition(heading)[0]
        text += body.replace(cut, cut * 2, 1) if again else body
    book = Path(EXTRACT).resolve().parent / f".twice-{strike.host.name}.yml"
    book.write_text(text)
    strike.undo.append(lambda: book.unlink(missing_ok=True))
    return str(book), ()


# -- by the hand of somebody who knows systemd ----------------------------------------------------------------------------


def _systemctl(verb: str, unit: str) -> Callable[[Strike], None]:
    def strike(strike: Strike) -> None:
        strike.host.inside(f"systemctl --no-block {verb} {unit}")

    return strike


def _window(strike: Strike) -> None:
    _signal(signal.SIGKILL, True)(strike)
    _hangs(strike)


_SERVED = "the run has no server or client of its own then"
_NOT_YET = {step: _SERVED for step in ("lock", "patch", "stop")} | {step: _SERVED for step in RESTORE}
_ONE_RESTORE = {step: "the same as 'stop extraction': the restore is one role and one tag" for step in RESTORE[1:]}
_ONE_RUN = {step: "the same run as 'lock': all steps are looked at" for step in STEPS[1:]}

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("fails", "the step fails", _fails, setup=_fails_setup),
        Fault(
            "hangs",
            "the step hangs",
            _hangs,
            settings={"hs_launch_timeout": 90, "hs_request_timeout": 6, "hs_retries": 1, "hs_error_budget": 0},
        ),
        Fault("SIGINT", "Ctrl-C at the controller", _signal(signal.SIGINT, True)),
        Fault("SIGTERM", "SIGTERM to the controller", _signal(signal.SIGTERM, False)),
        Fault("SIGHUP", "the controller's terminal is closed", _signal(signal.SIGHUP, True)),
        Fault("SIGKILL", "kill -9 of the controller", _signal(signal.SIGKILL, True)),
        Fault("cut 20 s", "the link is cut for 20 s", _cut(20)),
        Fault("cut", "the link is cut for good", _cut(0)),
        Fault("reboot", "power cut and boot of the host", _reboot),
        Fault("shm full", "/dev/shm is full", _full("/dev/shm")),
        Fault("output full", "the output's disk is full", _full(OUTPUT)),
        Fault("state full", "the state folder's disk is full", _full(STATE)),
        Fault("by hand", "the engine's file is changed by hand", _by_hand),
        Fault("upgraded", "the engine's package is upgraded", _upgraded),
        Fault("GPU", "a stranger takes a GPU", _gpu),
        Fault(
            "port",
            "a stranger takes the extraction's port, later production's",
            _port,
            instead={"check production": "production holds its port", "disarm": "production holds its port"},
        ),
        Fault("second", "a second operator comes", _second),
        Fault("tags", "--tags of the step alone", nothing, own_play=_tagged, instead=_ONE_RESTORE),
        Fault("start-at", "--start-at-task at the step", nothing, own_play=_started_at, instead=_ONE_RESTORE),
        Fault("check", "--check --diff", nothing, own_play=_checked, instead=_ONE_RUN),
        Fault("twice", "the role is run twice", nothing, own_play=_twice, instead=_ONE_RESTORE),
        Fault("stopped", "systemctl stop of the extraction server", _systemctl("stop", SERVER), instead=_NOT_YET),
        Fault("started", "somebody starts production", _systemctl("start", UNIT), instead=_NOT_YET),
        Fault(
            "client killed",
            "kill -9 of the client",
            lambda strike: strike.signal_unit(CLIENT, "KILL"),
            instead=_NOT_YET | {"launch": "the client does not run yet"},
        ),
        Fault(
            "window",
            "the window ends on a hanging server, and nobody watches",
            _window,
            settings={"hs_window": "150s"},
            instead={
                step: "see the other columns: the guard looks at the window all the same"
                for step in STEPS
                if step not in ("launch", "canary", "extract")
            },
        ),
    )
}
assert set(TAG) == set(FORWARD)
