"""Segments of shared memory that a server leaves in /dev/shm when it is killed: known as its own by having been mapped by it.

SGLang leaves semaphores and message queues of 25 MB a rank there after SIGKILL, and small ones after SIGTERM. What no process of
the extraction server was seen to map is somebody else's and stays, and so does what anybody still maps.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Dict, Iterable, Mapping

from . import procs

FOLDER = "/dev/shm/"
# proc(5): address perms offset dev inode pathname
_LINE = re.compile(r"\S+ \S+ \S+ \S+ (\d+)\s+(/dev/shm/[^/\n]+)$")


def mapped(pids: Iterable[int]) -> Dict[str, int]:
    """Files of /dev/shm that the processes ``pids`` have mapped: path to inode. Those of others we may not see into are left out."""
    found: Dict[str, int] = {}
    for pid in pids:
        try:
            lines = (procs.PROC / str(pid) / "maps").read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            match = _LINE.match(line) if FOLDER in line else None
            if match and not match.group(2).endswith(" (deleted)"):
                found[match.group(2)] = int(match.group(1))
    return found


def sweep(own: Mapping[str, int]) -> int:
    """Remove what is still there of ``own`` (of :func:`mapped`) and mapped by nobody; bytes that this freed."""
    left = {path: inode for path, inode in own.items() if _inode(path) == inode}
    if not left:
        return 0
    in_use = mapped(process.pid for process in procs.everyone())
    freed = 0
    for path in sorted(set(left) - set(in_use)):
        with contextlib.suppress(OSError):
            size = os.lstat(path).st_size
            os.unlink(path)
            freed += size
    return freed


def _inode(path: str) -> int:
    """Inode of a plain file below /dev/shm, 0 where there is none."""
    try:
        return os.lstat(path).st_ino if Path(path).is_file() and not os.path.islink(path) else 0
    except OSError:
        return 0
