"""When a step of a run is at work, seen in the run's own journal and files past the network."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from .host import OUTPUT, STATE, FaultHost

# in the order in which they come
FORWARD = ("lock", "patch", "stop", "launch", "canary", "extract")
RESTORE = ("stop extraction", "free GPUs", "restore source", "start production", "check production", "disarm")
STEPS = (*FORWARD, *RESTORE)


def begun(journal: dict[str, Any] | None, step: str, state: str = "begun") -> bool:
    """Whether the journal has a record of ``step``."""
    return any(record["step"] == step and record["state"] == state for record in (journal or {}).get("steps", []))


def _progress(host: FaultHost, journal: dict[str, Any] | None) -> dict[str, Any]:
    try:
        found = json.loads((host.disk(STATE) / "runs" / (journal or {})["run_id"] / "progress.json").read_text())
    except (OSError, ValueError, KeyError):
        return {}
    return found if isinstance(found, dict) else {}


def _samples(host: FaultHost) -> int:
    return len(list(host.disk(OUTPUT).glob("hidden_states/hs_*.safetensors")))


def at_work(host: FaultHost, step: str) -> bool:
    """Whether ``step`` is at work, or has been."""
    journal = host.journal()
    if step == "lock":
        return (host.disk(STATE) / "lock").exists()
    if step in ("patch", "stop"):
        return begun(journal, step)
    if step == "launch":  # in the middle of it: the server has said its first words
        logs = list(host.disk(STATE).glob(f"runs/{(journal or {}).get('run_id', '-')}/server.log"))
        return begun(journal, "launch") and bool(logs) and logs[0].stat().st_size > 0
    if step == "canary":
        return begun(journal, "extract") and _progress(host, journal).get("phase") == "canary"
    if step == "extract":
        return begun(journal, "extract") and _samples(host) >= 4
    if step == "disarm":  # the run is closed, the units go
        return any((host.disk(STATE) / "runs" / name / "journal.json").exists() for name in host.runs() - host.known)
    return begun(journal, "restore: " + step)


def wait(host: FaultHost, step: str, still: Callable[[], bool], patience: float = 400) -> bool:
    """Wait until ``step`` is at work; False where the run ended, or ``patience`` did, before it was seen."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        if at_work(host, step):
            return True
        if not still() and host.journal() is None:
            return False
        time.sleep(0.005)
    return False
