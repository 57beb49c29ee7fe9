"""The run's course: one line every few seconds in history.jsonl, thinned by itself so that it stays small however long the run is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List

PERIOD = 5.0  # seconds between two lines at first
LINES = 2000  # then every other line goes and the period doubles
KEYS = ("at", "phase", "done", "failed", "quarantined", "tokens", "bytes", "dump_free", "output_free")


class History:
    """``run_dir/history.jsonl``. A line: at (unix s), phase, done, failed, quarantined (samples), tokens, bytes (done so far),
    dump_free, output_free (bytes, or null where they could not be asked for).

    A client that is started again within its run goes on with the file. Lines may be further apart than the period, and one stands at
    each change of phase.
    """

    def __init__(self, run_dir: Path, period: float = PERIOD, most: int = LINES) -> None:
        self.path = run_dir / "history.jsonl"
        self.period = period
        self._most = most
        self._phase = ""
        self._last = 0.0
        self._whole = False  # whether the file holds exactly the lines: what a killed client left may end in a torn one
        self._lines: List[str] = self._kept()
        # what was thinned before stays as thin
        if len(self._lines) > 1:
            while self.period * most < json.loads(self._lines[-1])["at"] - json.loads(self._lines[0])["at"]:
                self.period *= 2

    def _kept(self) -> List[str]:
        """The whole lines of a file that is there already: the last one may be torn."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return []
        found = []
        for line in text.splitlines(keepends=True):
            try:
                whole = line.endswith("\n") and set(json.loads(line)) == set(KEYS)
            except (ValueError, TypeError):
                continue
            if whole:
                found.append(line)
        return found

    def add(self, mark: Dict[str, Any], last: bool = False) -> None:
        """Note ``mark`` (KEYS) if its time has come: the period is over, the phase is another one, or it is the ``last``. OSError where
        the disk refuses."""
        now, phase = float(mark["at"]), str(mark["phase"])
        if not last and phase == self._phase and 0 <= now - self._last < self.period:
            return
        self._last, self._phase = now, phase
        line = json.dumps({key: mark[key] for key in KEYS}) + "\n"
        self._lines.append(line)
        if len(self._lines) > self._most:
            self._lines = self._lines[::2]
            self.period *= 2
            self._whole = False
        if not self._whole:
            self._write()
        else:
            with open(self.path, "a", encoding="utf-8") as handle:
                handle.write(line)

    def _write(self) -> None:
        """The whole file anew; a reader sees the old one or this."""
        temporary = self.path.with_name(".history.jsonl.new")
        temporary.write_text("".join(self._lines), encoding="utf-8")
        os.replace(temporary, self.path)
        self._whole = True
