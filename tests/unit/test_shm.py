"""What a killed server leaves in /dev/shm: its own segments go, everybody else's stay. Real processes, real segments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_hs import shm

MAPS = """
import mmap, os, sys, time
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR, 0o600)
os.ftruncate(fd, 8192)
kept = mmap.mmap(fd, 8192)
os.close(fd)
print("mapped", flush=True)
time.sleep(600)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", MAPS, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "mapped\n"
    return process


def test_only_its_own_segments_that_nobody_maps_are_removed() -> None:
    own, shared, strangers = (Path(f"/dev/shm/hs-test-{os.getpid()}-{name}") for name in ("own", "shared", "stranger"))
    strangers.write_bytes(b"x" * 10)
    dying, also, living = holder(own), holder(shared), holder(shared)
    try:
        seen = shm.mapped([dying.pid, also.pid])
        assert seen == {str(path): path.stat().st_ino for path in (own, shared)}
        assert shm.sweep(seen) == 0, "mapped by its owner"
        for process in (dying, also):
            process.kill()
            process.wait()
        assert shm.sweep(seen) == 8192
        assert [path.exists() for path in (own, shared, strangers)] == [False, True, True]
        own.write_bytes(b"a new one of the same name")
        inode = own.stat().st_ino
        assert shm.sweep({**seen, str(own): inode + 1}) == 0, "not the file that was seen"
        assert own.exists()
    finally:
        for process in (dying, also, living):
            process.kill()
            process.wait()
        for path in (own, shared, strangers):
            path.unlink(missing_ok=True)
