"""A run's units of systemd: the files in two folders, written together, and the guard's timer started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping

from . import fsio, production

GUARD = "sglang-hs-guard."  # what the guard's units begin with; the others are the run's jobs
TIMER = GUARD + "timer"
RUN = "@RUN@"  # stands for the run's name, which the host chooses, in the texts that the controller made
# gone after a reboot; what is still there then, the guard, which restores; and the link that has its timer started at boot
FOLDERS = ("/run/systemd/system", "/etc/systemd/system", "/etc/systemd/system/timers.target.wants")
PATIENCE = 60.0  # seconds for one systemctl


def files() -> List[Path]:
    """The files of a run's units, also one that a killed writer left; the guard's last, and the link that starts it at the very end.

    Not the folders of that name: drop-ins are the host's own.
    """
    found = (
        unit
        for folder in FOLDERS
        for name in ("sglang-hs-*", ".sglang-hs-*")
        for unit in sorted(Path(folder).glob(name))
    )
    return [unit for unit in found if unit.is_file() or unit.is_symlink()]


def differences(units: Mapping[str, str]) -> List[Dict[str, Any]]:
    """What writing ``units`` (path -> text) would change, one {path, before, after} each."""
    found = []
    for name, text in units.items():
        try:
            before = Path(name).read_text(encoding="utf-8")
        except FileNotFoundError:
            before = ""
        if before != text:
            found.append({"path": name, "before": before, "after": text})
    return found


def arm(units: Mapping[str, str]) -> bool:
    """Write ``units`` and have the guard look every few seconds, also after a reboot; whether anything changed.

    Raises OSError where a file cannot be written, HsError where systemd does not take them.
    """
    changed = differences(units)
    for one in changed:
        fsio.write_text(Path(one["path"]), one["after"], 0o644)
    if changed:
        production.run(["systemctl", "daemon-reload"], PATIENCE)
    if not changed and _watches():
        return False
    production.run(["systemctl", "enable", "--now", TIMER], PATIENCE)
    return True


def _watches() -> bool:
    """Whether the timer runs and will after a reboot."""
    told = production.run(["systemctl", "show", "-p", "ActiveState,UnitFileState", "--value", TIMER], PATIENCE)
    return told.split() == ["active", "enabled"]
