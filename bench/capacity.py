"""``python -m bench.capacity``: docs/scale.md, what a large data set takes, computed from bench/report.json and from assumptions that are named as such."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from . import report
from .frame import ROOT
from .measures.plan_time import RECORDS, TOKENS

DOCUMENT = ROOT / "docs/scale.md"
TEMPLATE = Path(__file__).with_name("scale.md.j2")
HIDDEN, STATES, ITEMSIZE = 7168, 4, 2  # Kimi-K2.5 in bfloat16, three boundaries and one final state
DATA_SETS = (TOKENS, 1_000_000_000)
HOSTS = (1, 8, 64)
PREFILL = (2_000, 8_000, 32_000)  # tokens a second of one host's engine
GB = 10**9


@dataclass(frozen=True)
class Disk:
    """Something to write to. rate: bytes a second, sustained. size: bytes of one, 0 where it is shared and has no size of its own."""

    name: str
    rate: float
    size: float


DISKS = (
    Disk("a SATA SSD of 7.68 TB", 0.45 * GB, 7.68e12),
    Disk("an NVMe disk of 15.36 TB", 3.0 * GB, 15.36e12),
    Disk("a share over 10 Gbit/s", 1.1 * GB, 0),
    Disk("a share over 100 Gbit/s", 11.0 * GB, 0),
)


@dataclass(frozen=True)
class Measured:
    """A figure of ours, and where it comes from. known: whether it was measured."""

    what: str
    value: float
    unit: str
    source: str
    known: bool


def measured(rows: Iterable[Mapping[str, Any]]) -> dict[str, Measured]:
    """What the computation needs, from the report; else assumed."""
    scale = {"GB/s": GB}  # to the units below
    found = {str(row["name"]): float(row["value"]) * scale.get(str(row.get("unit")), 1.0) for row in rows}
    wanted = {
        "path": ("vs_specforge", 0.2 * GB, "bytes/s", "one host's client and writer, all checks made"),
        "book": ("book_size", 250.0, "bytes", "the book, a sample"),
        "client": (
            "client_per_sample, beside the bytes",
            1.0,
            "ms",
            "processor time of the client, a sample, beside its bytes",
        ),
        "plan": ("plan_time, JSON lines", 10.0, "s", f"the plan of {RECORDS:,} rows"),
        "resume": ("resume_scan, client", 5.0, "s", "the start on a million finished samples"),
        "finish": ("finish", 60.0, "s", "describing 100,000 rows at the end"),
    }
    made = {}
    for key, (name, otherwise, unit, what) in wanted.items():
        known = name in found
        source = f"measured ({name})" if known else f"assumed, `{name}` is not measured yet"
        made[key] = Measured(what, found.get(name, otherwise), unit, source, known)
    return made


def token_bytes() -> int:
    """Bytes of a token's states and its id."""
    return HIDDEN * STATES * ITEMSIZE + 8


def first_limit(prefill: float, disk: Disk, path: float, sharers: int) -> tuple[str, float]:
    """(what saturates first, tokens a second of one host): the engine, our path, or the disk, which ``sharers`` hosts share."""
    limits = {
        "the engine": prefill,
        "the client": path / token_bytes(),
        "the disk": disk.rate / (1 if disk.size else sharers) / token_bytes(),
    }
    name = min(limits, key=lambda key: limits[key])
    return name, limits[name]


def size(number: float) -> str:
    """Bytes, decimal."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= step:
            return f"{number / step:,.3g} {unit}"
    return f"{number:,.0f} B"


def hours(seconds: float) -> str:
    """Seconds as minutes, hours, or days."""
    found = seconds / 3600
    if found < 1:
        return f"{seconds / 60:,.1f} min"
    return f"{found:,.1f} h" if found < 100 else f"{found / 24:,.0f} days"


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """docs/scale.md."""
    ours = measured(rows)
    mean = TOKENS / RECORDS
    sets = []
    for tokens in DATA_SETS:
        samples, data = tokens / mean, tokens * token_bytes()
        shares = []
        for hosts in HOSTS:
            part = samples / hosts
            shares.append(
                {
                    "hosts": hosts,
                    "samples": part,
                    "data": size(data / hosts),
                    "disks": [-(-data // hosts // int(disk.size)) for disk in DISKS if disk.size],
                    "book": size(part * ours["book"].value),
                    "client": part * ours["client"].value / 1000,
                    "plan": ours["plan"].value * part / RECORDS,
                    "resume": ours["resume"].value * part / 1e6,
                    "finish": ours["finish"].value * part / 1e5,
                    "times": {
                        prefill: [(disk.name, *first_limit(prefill, disk, ours["path"].value, hosts)) for disk in DISKS]
                        for prefill in PREFILL
                    },
                    "tokens": tokens / hosts,
                }
            )
        sets.append({"tokens": tokens, "samples": samples, "data": size(data), "shares": shares})
    frame = jinja2.Environment(
        autoescape=False,  # noqa: S701 - no HTML
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    frame.globals.update(size=size, hours=hours, number=report.number)
    return frame.from_string(TEMPLATE.read_text()).render(
        sets=sets, ours=ours, disks=DISKS, prefill=PREFILL, mean=mean, token=token_bytes(), states=STATES, hidden=HIDDEN
    )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write docs/scale.md from bench/report.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where it is not up to date")
    options = parser.parse_args()
    text = page(report.load())
    if options.check:
        return 0 if DOCUMENT.is_file() and DOCUMENT.read_text() == text else 1
    DOCUMENT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
