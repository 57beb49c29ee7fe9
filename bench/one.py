"""One measurement, in whichever Python it belongs to: ``python -m bench.one KEY --disk D --memory M --to FILE``.

SIGTERM ends it as Ctrl-C does, so that what it started is ended and what it wrote is removed. Its figures go to FILE, a JSON list.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal
import sys
from pathlib import Path
from types import FrameType

from .frame import ROOT, Place


def interrupted(number: int, frame: FrameType | None) -> None:
    """Only once: the second must not cut the cleaning up short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="One measurement of bench/measures.")
    parser.add_argument("key")
    parser.add_argument("--disk", type=Path, required=True)
    parser.add_argument("--memory", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupted)
    sys.path[:0] = [str(ROOT / part) for part in ("module_utils", "files/engine", "tests/e2e")]
    measure = importlib.import_module(f"bench.measures.{options.key}")
    try:
        figures = [figure.row() for figure in measure.run(Place(options.key, options.disk, options.memory))]
    except KeyboardInterrupt:
        return 130
    options.to.write_text(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
