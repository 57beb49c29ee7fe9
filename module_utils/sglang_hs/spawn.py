"""Start a process that is nobody's child: own session, exact argv, environment, folder, user, limits."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from . import procs
from .errors import HsError

_LIMITS = {
    "Max open files": resource.RLIMIT_NOFILE,
    "Max locked memory": resource.RLIMIT_MEMLOCK,
    "Max processes": resource.RLIMIT_NPROC,
    "Max core file size": resource.RLIMIT_CORE,
    "Max stack size": resource.RLIMIT_STACK,
}


def detached(spec: Mapping[str, Any], log: Optional[str]) -> procs.Process:
    """Start ``spec`` and let go of it.

    ``spec``: argv, env, cwd and, where known, exe, uid, gid, groups, umask, limits (as :func:`procs.adoption` reads them).
    ``log``: file that gets both outputs, appended; None sends them to /dev/null. Standard input is /dev/null.
    Raises HsError when it cannot be started.
    """
    argv: List[str] = list(spec["argv"])
    output = open(log, "ab") if log else open(os.devnull, "wb")
    with output:
        try:
            child = subprocess.Popen(
                argv,
                executable=_executable(spec),
                env=dict(spec["env"]),
                cwd=spec["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: _become(spec),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise HsError("cannot start {}: {}".format(" ".join(argv[:4]), error)) from error
    process = procs.read(child.pid)
    if process is None:
        raise HsError("{} ended at once with status {}".format(" ".join(argv[:4]), child.wait()))
    return process


def _executable(spec: Mapping[str, Any]) -> str:
    """The file to execute: argv[0] as its own PATH finds it, else the file that ran before (a changed process title)."""
    name = str(spec["argv"][0])
    if "/" in name:
        candidates = [os.path.join(spec["cwd"], name)]
    else:
        candidates = [os.path.join(folder, name) for folder in str(spec["env"].get("PATH", os.defpath)).split(":")]
    for candidate in [*candidates, str(spec.get("exe", ""))]:
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
            return candidate
    return name


def _become(spec: Mapping[str, Any]) -> None:
    """Between fork and exec: limits, groups, user, umask - only what differs, so that an ordinary user can do it too."""
    for name, pair in dict(spec.get("limits", {})).items():
        if name in _LIMITS:
            wanted = tuple(resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in pair)
            if wanted != resource.getrlimit(_LIMITS[name]):
                try:
                    resource.setrlimit(_LIMITS[name], (wanted[0], wanted[1]))
                except (OSError, ValueError):
                    resource.setrlimit(_LIMITS[name], (resource.getrlimit(_LIMITS[name])[1],) * 2)
    if os.geteuid() == 0:
        os.setgroups(list(spec.get("groups", os.getgroups())))
        os.setgid(int(spec.get("gid", os.getgid())))
        os.setuid(int(spec.get("uid", os.getuid())))
    os.umask(int(spec.get("umask", 0o022)))


def program(lib: Path, *words: str) -> Dict[str, Any]:
    """Spec of this very program as installed under ``lib``, with ``words`` as arguments."""
    import sys

    return {
        "argv": [sys.executable, "-m", "sglang_hs", *words],
        "env": {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": str(lib),
            "LC_ALL": "C.UTF-8",
            "HOME": os.environ.get("HOME", "/"),
        },
        "cwd": "/",
    }


def wait_gone(processes: List[procs.Process], patience: float) -> List[procs.Process]:
    """Wait until all of ``processes`` are gone; those that are still there after ``patience`` seconds."""
    until = time.monotonic() + patience
    while True:
        living = [process for process in processes if procs.alive(process.pid, process.start)]
        if not living or time.monotonic() > until:
            return living
        time.sleep(0.1)
