"""What the GPUs hold, as ``nvidia-smi`` tells it; a host without that program has no GPU to look after."""

from __future__ import annotations

import shutil
import subprocess
from typing import Dict, List, Set, Tuple

from .errors import HsError


def present() -> bool:
    """Whether this host has nvidia-smi."""
    return shutil.which("nvidia-smi") is not None


def _query(*arguments: str) -> List[List[str]]:
    """Rows of an nvidia-smi query in CSV without header and units."""
    command = ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HsError(
            "nvidia-smi does not answer: {}".format(error),
            "everything",
            "look at the driver, e.g. dmesg | grep -i nvrm",
        ) from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise HsError(
            "nvidia-smi failed ({}): {}".format(done.returncode, said[:300]),
            "everything",
            "look at the driver, e.g. dmesg | grep -i nvrm",
        )
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.decode().splitlines() if line.strip()]


def inventory() -> List[Dict[str, object]]:
    """One dict a GPU: index, name, memory in MiB (total, used)."""
    if not present():
        return []
    rows = _query("--query-gpu=index,name,memory.total,memory.used")
    return [{"index": int(row[0]), "name": row[1], "total_mib": int(row[2]), "used_mib": int(row[3])} for row in rows]


def users() -> List[Tuple[int, int]]:
    """(pid, MiB) of each compute process on any GPU."""
    if not present():
        return []
    rows = _query("--query-compute-apps=pid,used_memory")
    return [(int(row[0]), int(row[1]) if row[1].isdigit() else 0) for row in rows if row[0].isdigit()]


def strangers(ours: Set[int]) -> List[int]:
    """Pids on a GPU that are not in ``ours``."""
    return sorted({pid for pid, _ in users()} - ours)
