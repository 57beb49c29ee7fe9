"""What the GPUs hold, as ``nvidia-smi`` tells it; a host without that program has no GPU to look after."""

from __future__ import annotations

import shutil
import subprocess
from typing import Dict, List, Mapping, Optional, Set, Tuple

from .errors import HsError

SLACK = 512  # MiB: what a driver keeps for itself comes and goes


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


def users() -> List[Tuple[str, int, Optional[int]]]:
    """(GPU's uuid, pid, MiB) of each compute process; MiB is None where the driver does not tell (in a container, say)."""
    if not present():
        return []
    rows = _query("--query-compute-apps=gpu_uuid,pid,used_memory")
    return [(row[0], int(row[1]), int(row[2]) if row[2].isdigit() else None) for row in rows if row[1].isdigit()]


def strangers(ours: Set[int]) -> List[int]:
    """Pids on a GPU that are not in ``ours``."""
    return sorted({pid for _, pid, _ in users()} - ours)


def memory() -> Dict[str, int]:
    """MiB in use on each GPU, by its uuid."""
    if not present():
        return {}
    return {row[0]: int(row[1]) for row in _query("--query-gpu=uuid,memory.used") if row[1].isdigit()}


def baseline(ours: Set[int]) -> Dict[str, int]:
    """MiB that each GPU will have in use once the processes ``ours`` are gone; a GPU of which the driver does not tell is left out."""
    rest = memory()
    for uuid, pid, size in users():
        if pid in ours:
            if size is None:
                rest.pop(uuid, None)
            elif uuid in rest:
                rest[uuid] = max(rest[uuid] - size, 0)
    return rest


def not_given_back(wanted: Mapping[str, int]) -> List[str]:
    """The GPUs that have more in use than ``wanted`` (of :func:`baseline`) and :data:`SLACK`, each as a piece of a sentence."""
    now = memory()
    return [
        "{} has {} MiB in use, without production it had {}".format(uuid, now[uuid], size)
        for uuid, size in sorted(wanted.items())
        if now.get(uuid, 0) > size + SLACK
    ]
