"""docs/fault-matrix.md, from docs/fault-matrix.json."""

from __future__ import annotations

import json
import os
import pwd
from typing import Any

from .cell import named
from .faults import FAULTS
from .host import REPO
from .moments import STEPS

RESULTS = REPO / "docs/fault-matrix.json"
PAGE = REPO / "docs/fault-matrix.md"

HEAD = """# The fault matrix

Each step of a run, and whatever can go wrong in it, done to a real systemd host over real ssh with a real SGLang server as production
(`make faults`; the one fake is `nvidia-smi`). After each cell it is looked at from outside: production gives real generations with its old
argv and environment; the engine's files have their old hashes (or the upgraded one's, or a colleague's edit and nothing of ours); no
file, process, timer, unit or lock is left; every accepted sample has the bytes of its record; the controller's exit status was 0 if and
only if the data set is complete; `restore.yml` afterwards has changed=0.

The number is the seconds from the blow until production was back and the run closed (or the run went on and was through). **m**: a person
had to take the fault away first (a stranger is never killed, a full disk never emptied by us); after that the guard, or what the table
says, brought production back. **+**: played in one run with a fault of another step, which is harder; where such a run was not green, its
cells were played apart. A dash has its reason below. The leases are shortened for this table (`hs_controller_patience` 45 s
instead of 120).

"""


def load() -> dict[str, dict[str, Any]]:
    """The results so far, by cell."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def save(results: dict[str, dict[str, Any]]) -> None:
    """Keep them, whole, and write the page."""
    new = RESULTS.with_name(RESULTS.name + ".new")
    text = json.dumps(results, indent=1, sort_keys=True)
    home = pwd.getpwuid(os.getuid()).pw_dir  # whose machine it was played on is nobody's business
    new.write_text(text.replace(f"{home}/.cache", "~/.cache") + "\n")
    new.replace(RESULTS)
    PAGE.write_text(page(results))


def _mark(step: str, fault: str, results: dict[str, dict[str, Any]]) -> str:
    if step in FAULTS[fault].instead:
        return "–"
    found = results.get(named(step, fault))
    if found is None:
        return "?"
    if found["problems"]:
        return "**red**"
    return f"{found['back']:.0f}{' m' if found['mended'] else ''}{' +' if found.get('beside') else ''}"


def _told(cell: str) -> str:
    step, _, fault = cell.partition(":")
    return f"{step}, {FAULTS[fault].told}"


def page(results: dict[str, dict[str, Any]]) -> str:
    """The page as text."""
    cells = [(step, name) for name, fault in FAULTS.items() for step in STEPS if step not in fault.instead]
    green = [cell for cell in cells if results.get(named(*cell)) and not results[named(*cell)]["problems"]]
    red = [cell for cell in cells if results.get(named(*cell)) and results[named(*cell)]["problems"]]
    lines = [
        HEAD
        + f"**{len(green)} of {len(cells)} cells green, {len(red)} red, {len(cells) - len(green) - len(red)} not played yet.**",
        "",
    ]
    lines += ["| fault | " + " | ".join(STEPS) + " |", "|---" * (len(STEPS) + 1) + "|"]
    for name, fault in FAULTS.items():
        lines.append(f"| {fault.told} | " + " | ".join(_mark(step, name, results) for step in STEPS) + " |")
    if red:
        lines += ["", "## Red", ""]
        lines += [
            f"- {step}, {FAULTS[name].told}: {'; '.join(results[named(step, name)]['problems'])}" for step, name in red
        ]
    lines += ["", "## No such cell", ""]
    for fault in FAULTS.values():
        reasons: dict[str, list[str]] = {}
        for step, why in fault.instead.items():
            reasons.setdefault(why, []).append(step)
        lines += [f"- {fault.told} ({', '.join(steps)}): {why}" for why, steps in reasons.items()]
    lines += ["", "## What brought production back, and what the controller said", ""]
    lines += ["| cell | in one run with | status | samples | the run was closed because |", "|---|---|---|---|---|"]
    for step, name in cells:
        found = results.get(named(step, name))
        if found:
            beside = "; ".join(_told(cell) for cell in found.get("beside", []))
            numbers = f"{found['code']} | {found['accepted']} | {found['why']}"
            lines.append(f"| {step}, {FAULTS[name].told} | {beside} | {numbers} |")
    return "\n".join(lines) + "\n"
