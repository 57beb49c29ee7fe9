"""Processes as /proc tells of them: who listens on a port, what belongs to a server, how it was started, how it is ended.

A pid alone names nobody (it is given again); a process here is always the pair of pid and start time.
Source: proc(5).
"""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import os
import pwd
import re
import shlex
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional

PROC = Path("/proc")


class Process(NamedTuple):
    """One process: identity (``pid``, ``start`` in clock ticks since boot), family, command line, owner."""

    pid: int
    start: int
    ppid: int
    pgrp: int
    session: int
    state: str
    argv: List[str]
    uid: int

    @property
    def command(self) -> str:
        """The command line as one would type it."""
        return " ".join(shlex.quote(word) for word in self.argv) or "[{}]".format(self.pid)

    @property
    def user(self) -> str:
        """Owner's name, or the number where the host has no name for it."""
        return user_name(self.uid)

    def describe(self) -> str:
        """pid, user and command line in one short piece, as an operator needs it to find the owner."""
        command = self.command
        return "pid {} of {}: {}".format(self.pid, self.user, command if len(command) < 160 else command[:157] + "...")


def user_name(uid: int) -> str:
    """The user's name, or the number where the host has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def read(pid: int) -> Optional[Process]:
    """The process ``pid``, or None when it is gone (a zombie counts as gone: it runs no code and holds nothing)."""
    folder = PROC / str(pid)
    try:
        stat = (folder / "stat").read_text(errors="replace")
        argv = [os.fsdecode(word) for word in (folder / "cmdline").read_bytes().split(b"\0")[:-1]]
        uid = folder.stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[19]), int(fields[1]), int(fields[2]), int(fields[3]), fields[0], argv, uid)


def everyone() -> List[Process]:
    """All processes there are now."""
    found = (read(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit())
    return [process for process in found if process is not None]


def alive(pid: int, start: int) -> bool:
    """Whether that very process still runs."""
    process = read(pid)
    return process is not None and process.start == start


def family(pid: int, table: Optional[List[Process]] = None) -> List[Process]:
    """``pid`` and all its descendants, parents first."""
    table = everyone() if table is None else table
    children: Dict[int, List[Process]] = {}
    for process in table:
        children.setdefault(process.ppid, []).append(process)
    found = [process for process in table if process.pid == pid]
    for process in found:
        found.extend(children.get(process.pid, []))
    return found


def environment(pid: int) -> Dict[str, str]:
    """The environment that ``pid`` was started with. Raises PermissionError for a stranger's process."""
    pairs = (word.partition(b"=") for word in (PROC / str(pid) / "environ").read_bytes().split(b"\0") if b"=" in word)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def adoption(process: Process) -> Dict[str, Any]:
    """All that is needed to start ``process`` again exactly so. Holds its environment, hence secrets: keep it 0600."""
    folder = PROC / str(process.pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
    return {
        "pid": process.pid,
        "start": process.start,
        "argv": process.argv,
        "env": environment(process.pid),
        "cwd": os.readlink(str(folder / "cwd")),
        "exe": os.readlink(str(folder / "exe")),
        "uid": int(status["Uid"].split()[0]),
        "gid": int(status["Gid"].split()[0]),
        "groups": [int(group) for group in status.get("Groups", "").split()],
        "umask": int(status.get("Umask", "0022").strip(), 8),
        "limits": _limits(folder),
        "stdout": _log_file(folder / "fd" / "1"),
        "stderr": _log_file(folder / "fd" / "2"),
        "unit": unit_of(process.pid),
    }


def _log_file(link: Path) -> Optional[str]:
    """The regular file behind an open descriptor: the log is continued there. A terminal or a pipe is gone, so None."""
    try:
        target = os.readlink(str(link))
    except OSError:
        return None
    return target if os.path.isfile(target) else None


def _limits(folder: Path) -> Dict[str, List[str]]:
    """Resource limits by their name in /proc: [soft, hard]. Open files and locked memory matter to a GPU server."""
    limits = {}
    for line in (folder / "limits").read_text().splitlines()[1:]:
        match = re.match(r"(Max [a-z ]+?)\s{2,}(\S+)\s+(\S+)", line)
        if match:
            limits[match.group(1)] = [match.group(2), match.group(3)]
    return limits


def unit_of(pid: int) -> Optional[str]:
    """The systemd service of the *system* manager that ``pid`` belongs to, or None (a login session, no systemd)."""
    try:
        lines = (PROC / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "name=systemd") and "/user.slice/" not in path:
            parts = [part for part in path.split("/") if part.endswith(".service")]
            if parts:
                return parts[-1]
    return None


class Listener(NamedTuple):
    """A listening TCP socket: address (IPv4 or IPv6 text) and its owner, None where we may not see it."""

    address: str
    port: int
    process: Optional[Process]


def listeners(port: int) -> List[Listener]:
    """Who listens on TCP ``port`` in this network namespace."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            raw, _, number = fields[1].partition(":")
            if fields[3] == "0A" and int(number, 16) == port:
                found.append(Listener(_address(raw), port, _owner(fields[9])))
    return found


def _address(raw: str) -> str:
    """/proc/net/tcp prints each 32-bit word of the address in host byte order."""
    words = [int(raw[i : i + 8], 16) for i in range(0, len(raw), 8)]
    return str(ipaddress.ip_address(struct.pack("={}I".format(len(words)), *words)))


def _owner(inode: str) -> Optional[Process]:
    """The eldest process that holds the socket ``inode``: children inherit it."""
    wanted = "socket:[{}]".format(inode)
    holders = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for fd in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(str(fd)) == wanted:
                        process = read(int(entry.name))
                        if process is not None:
                            holders.append(process)
                        break
    return min(holders, key=lambda process: process.start) if holders else None


def port_free(port: int) -> bool:
    """Whether nobody listens on ``port``."""
    return not listeners(port)


def signal_process(process: Process, number: int) -> None:
    """Send a signal to that very process: looked at again just before, so a pid given anew is not hit."""
    if alive(process.pid, process.start):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(processes: Iterable[Process], patience: float) -> List[Process]:
    """End a server gently, then surely: TERM to the first (the main process), wait, KILL what remains of *these* processes.

    The main process alone gets TERM: SGLang's whole group getting it ended late or never. Returns those that had to be killed.
    ``patience`` in seconds. Nobody outside ``processes`` and their descendants is touched.
    """
    members = {(process.pid, process.start): process for process in processes}
    if not members:
        return []
    signal_process(next(iter(members.values())), signal.SIGTERM)
    until = time.monotonic() + patience
    while time.monotonic() < until:
        table = everyone()
        living = [process for process in table if (process.pid, process.start) in members]
        for process in living:  # a server that is loading still forks
            for child in family(process.pid, table):
                members.setdefault((child.pid, child.start), child)
        if not living:
            return []
        time.sleep(0.1)
    killed = []
    for _ in range(50):
        living = [process for process in everyone() if (process.pid, process.start) in members]
        if not living:
            break
        for process in living:
            if process not in killed:
                killed.append(process)
            signal_process(process, signal.SIGKILL)
        time.sleep(0.1)
    return killed


def who_am_i() -> str:
    """user@host of this program, for records."""
    return "{}@{}".format(user_name(os.geteuid()), socket.gethostname())


def group_name(gid: int) -> str:
    """The group's name, or its number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
