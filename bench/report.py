"""The table, bench/report.json, and docs/performance.md, which is made from both the report and the measurements' docstrings."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jinja2

from . import measures as package
from .frame import NOISE, ROOT

REPORT = ROOT / "bench/report.json"
DOCUMENT = ROOT / "docs/performance.md"
TEMPLATE = Path(__file__).with_name("performance.md.j2")

Row = dict[str, Any]


def measures() -> dict[str, ModuleType]:
    """Key -> module of every measurement, in the table's order."""
    found = {
        part.name: importlib.import_module(f"bench.measures.{part.name}")
        for part in pkgutil.iter_modules(package.__path__)
    }
    return dict(sorted(found.items(), key=lambda item: (item[1].ORDER, item[0])))


def runs(keys: Sequence[str]) -> dict[str, list[str]]:
    """The measurements that must be run for ``keys``, each with those whose figures come of it."""
    known = measures()
    wanted = list(dict.fromkeys(getattr(known[key], "WITH", key) for key in keys))
    return {one: [key for key, module in known.items() if getattr(module, "WITH", key) == one] for one in wanted}


def load() -> list[Row]:
    """The last report; empty where there is none."""
    return list(json.loads(REPORT.read_text())) if REPORT.is_file() else []


def save(rows: Sequence[Row]) -> None:
    """Write the report."""
    REPORT.write_text(json.dumps(rows, indent=1) + "\n")


def key_of(row: Row) -> str:
    """The measurement that a line comes from: a name is ``key`` or ``key, more words``."""
    return str(row["name"]).split(",")[0]


def merge(old: Sequence[Row], found: Mapping[str, Sequence[Row]], order: Sequence[str]) -> list[Row]:
    """The new lines in place of the old ones of the same measurements; lines of measurements that are gone go."""
    kept = [row for row in old if key_of(row) in order and key_of(row) not in found]
    rows = kept + [row for rows in found.values() for row in rows]
    return sorted(rows, key=lambda row: order.index(key_of(row)))


def number(value: float | None) -> str:
    """Three digits that matter."""
    if value is None:
        return ""
    if value and abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def verdict(row: Row) -> str:
    """In a word."""
    return {True: "met", False: "MISSED", None: "unclear"}[row["met"]]


def cells(row: Row) -> list[str]:
    """A line of the table."""
    ratio = f"{number(row['ratio'])}x" if row["ratio"] is not None else ""
    ours = f"{number(row['value'])} {row['unit']}"
    other = f"{number(row['other'])} {row['unit']}" if row["other"] is not None else ""
    return [row["name"], ours, other, ratio, row["goal"], verdict(row), f"{row['spread']:.0%} of {row['repeats']}"]


def table(rows: Sequence[Row]) -> str:
    """For a terminal."""
    lines = [["figure", "ours", "compared", "ratio", "goal", "", "spread"], *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for row in rows:
        if row["met"] is None:
            text.append(
                f"{row['name']}: the spread is {row['spread']:.0%} and the goal lies inside: this run says nothing; measure on a quiet machine"
            )
    return "\n".join(text)


def machine() -> str:
    """Where this was measured, as far as it matters."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "a CPU",
    )
    return f"{len(os.sched_getaffinity(0))} cores ({cpu})"


def document(rows: Sequence[Row]) -> None:
    """Write docs/performance.md."""
    DOCUMENT.write_text(page(rows, machine()))


def machine_of(text: str) -> str:
    """The machine that a page names."""
    found = re.search(r"^Measured on (.*), without a GPU\.$", text, re.M)
    return found.group(1) if found else ""


def page(rows: Sequence[Row], where: str) -> str:
    """docs/performance.md. where: the machine that was measured on."""
    parts = []
    for key, module in measures().items():
        mine = [row for row in rows if key_of(row) == key]
        first, _, rest = (inspect.getdoc(module) or "").partition("\n")
        missed = not mine or not all(row["met"] for row in mine)
        limit = " ".join(getattr(module, "LIMIT", "").split()) if missed else ""
        parts.append({"key": key, "title": first, "text": rest.strip(), "rows": mine, "limit": limit})
    frame = jinja2.Environment(
        autoescape=False,  # noqa: S701 - no HTML
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    frame.globals.update(number=number, verdict=verdict, cells=cells)
    return frame.from_string(TEMPLATE.read_text()).render(parts=parts, machine=where, noise=NOISE)
