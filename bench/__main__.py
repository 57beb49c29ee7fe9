"""``python -m bench [KEY ...]``: measure, print the table, write bench/report.json and docs/performance.md.

Exit status: 0 when every goal is met, 1 when one is missed (or a measurement says nothing, or failed), 130 after Ctrl-C.
With keys, only these are measured; the lines of the others stay in the report as they were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from . import report
from .frame import ROOT

sys.path.insert(0, str(ROOT / "module_utils"))

from sglang_hs import procs

PATIENCE = 90  # seconds for a measurement that was told to end


def cache() -> Path:
    """The folder that is shared between checkouts."""
    given = os.environ.get("HS_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(home) / "sglang-hidden-states"


@contextlib.contextmanager
def folders(disk: Path | None) -> Iterator[tuple[Path, Path]]:
    """A folder on a disk and one in memory, gone at the end."""
    found = [Path(tempfile.mkdtemp(prefix="sglang-hs-bench-", dir=place)) for place in (disk, "/dev/shm")]
    try:
        yield found[0], found[1]
    finally:
        for folder in found:
            shutil.rmtree(folder, ignore_errors=True)


def measure(key: str, python: str, disk: Path, memory: Path) -> list[dict[str, Any]] | None:
    """A measurement's figures, None where it failed. A process of its own, ended with whatever it started if we are."""
    engine = cache() / "engine/venv/bin/python"
    program = str(engine) if python == "engine" else sys.executable
    place = {"disk": disk / key, "memory": memory / key}
    for folder in place.values():
        folder.mkdir()
    result = disk / f"{key}.json"
    words = [program, "-m", "bench.one", key, "--to", str(result)]
    for name, folder in place.items():
        words += [f"--{name}", str(folder)]
    env = {**os.environ, "HS_CACHE": str(cache()), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    family: list[procs.Process] = []
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            family = procs.family(process.pid) or family
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        raise
    finally:
        procs.end([one for one in family if procs.alive(one.pid, one.start)], 3)
        for folder in place.values():
            shutil.rmtree(folder, ignore_errors=True)
    return json.loads(result.read_text()) if process.returncode == 0 else None


def on_signal(number: int, frame: FrameType | None) -> None:
    """SIGTERM is Ctrl-C to us."""
    raise KeyboardInterrupt


def main() -> int:
    """The command line."""
    known = report.measures()
    parser = argparse.ArgumentParser(description="Measure what has a goal.")
    parser.add_argument("keys", nargs="*", metavar="KEY", help=f"one of: {', '.join(known)}")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to be measured (default: $TMPDIR or /tmp)")
    parser.add_argument("--document", action="store_true", help="measure nothing, only write docs/performance.md anew")
    options = parser.parse_args()
    unknown = sorted(set(options.keys) - set(known))
    if unknown:
        parser.error(f"no such measurement: {', '.join(unknown)}; there are {', '.join(known)}")
    if options.document:
        report.document(report.load())
        return 0
    signal.signal(signal.SIGTERM, on_signal)
    found: dict[str, list[dict[str, Any]]] = {}
    failed = []
    try:
        with folders(options.disk) as (disk, memory):
            for key, parts in report.runs(options.keys or list(known)).items():
                began = time.monotonic()
                print(f"{' and '.join(parts)} ...", file=sys.stderr, flush=True)
                figures = measure(key, known[key].PYTHON, disk, memory)
                print(f"{key}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
                if figures is None:
                    failed += parts
                else:
                    found.update((part, [row for row in figures if report.key_of(row) == part]) for part in parts)
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    lines = report.merge(report.load(), found, list(known))
    report.save(lines)
    report.document(lines)
    now = [row for key in found for row in found[key]]
    print(report.table(now))
    for key in failed:
        print(f"{key}: the measurement failed, see above")
    return 1 if failed or not all(row["met"] for row in now) else 0


if __name__ == "__main__":
    sys.exit(main())
