"""A terminal of just what ansible-playbook and this project write to one: text, colours, carriage return, cursor up, erase.

For tests that look at what an operator sees, and for the recordings in docs/img. Anything else that a real terminal would act on is a
ValueError: nobody here should write it.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_ESCAPE = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])")
_INCOMPLETE = re.compile(r"\x1b(\[[0-9;]*)?$")


@dataclass(frozen=True)
class Cell:
    """A character and the colour (the parameters of SGR) that it was written in."""

    text: str = " "
    colour: str = ""


class Terminal:
    """``columns`` wide; what scrolls out above its ``lines`` is kept."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self.columns = columns
        self.lines = lines
        self.rows: list[list[Cell]] = [[]]  # all that was ever written, the oldest first
        self.row = self.column = 0
        self.colour = ""
        self._rest = ""

    def feed(self, text: str) -> None:
        """Act on what a program wrote; an escape sequence may come in pieces."""
        text = self._rest + text
        cut = _INCOMPLETE.search(text)
        self._rest, text = (text[cut.start() :], text[: cut.start()]) if cut else ("", text)
        while text:
            if text[0] == "\x1b":
                found = _ESCAPE.match(text)
                if found is None:
                    raise ValueError(f"unknown escape sequence {text[:20]!r}")
                self._act(found.group(1), found.group(2))
                text = text[found.end() :]
                continue
            self._put(text[0])
            text = text[1:]

    def _act(self, words: str, letter: str) -> None:
        if letter == "m":
            self.colour = "" if words in ("", "0") else words
        elif letter == "A":
            top = max(0, len(self.rows) - self.lines)
            self.row = max(top, self.row - int(words or 1))
        elif letter == "J" and words in ("", "0"):
            self.rows[self.row] = self.rows[self.row][: self.column]
            del self.rows[self.row + 1 :]
        elif letter == "K" and words in ("", "0"):
            self.rows[self.row] = self.rows[self.row][: self.column]
        else:
            raise ValueError(f"unknown escape sequence ESC[{words}{letter}")

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self.row += 1
            if self.row == len(self.rows):
                self.rows.append([])
        elif letter >= " ":
            if self.column == self.columns:  # a terminal wraps when the next character comes
                self._put("\n")
                self.column = 0
            row = self.rows[self.row]
            row += [Cell()] * (self.column + 1 - len(row))
            row[self.column] = Cell(letter, self.colour)
            self.column += 1
        else:
            raise ValueError(f"unknown control character {letter!r}")

    def shown(self) -> list[list[Cell]]:
        """What is on the screen now."""
        return self.rows[-self.lines :]

    def text(self) -> list[str]:
        """All lines ever written that were not erased, without colours."""
        return ["".join(cell.text for cell in row).rstrip() for row in self.rows]


class Session:
    """A program on a pseudo-terminal, and the terminal that shows it. ``seen``: (seconds since the start, what was written)."""

    def __init__(
        self, words: Sequence[str], columns: int, lines: int, env: dict[str, str], cwd: Path | None = None
    ) -> None:
        self.terminal = Terminal(columns, lines)
        self.seen: list[tuple[float, str]] = []
        self._begin = time.monotonic()
        self._main, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        # below a shell's background job Ctrl-C is ignored, and stays so in every process; a terminal's programs hear it
        self.process = subprocess.Popen(
            words,
            stdin=there,
            stdout=there,
            stderr=there,
            cwd=cwd,
            env=env,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(there)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, patience: float) -> bool:
        """Take in what comes within ``patience`` seconds; whether the program may still write."""
        if not select.select([self._main], [], [], patience)[0]:
            return True
        try:
            data = os.read(self._main, 65536)
        except OSError:  # the other end is closed
            data = b""
        if not data:
            return False
        text = self._decoder.decode(data)
        self.seen.append((time.monotonic() - self._begin, text))
        self.terminal.feed(text)
        return True

    def until(self, what: str, seen: Callable[[Terminal], bool], patience: float = 120) -> None:
        """Read until ``seen(terminal)``; AssertionError with the screen where that does not come."""
        end = time.monotonic() + patience
        while not seen(self.terminal):
            alive = self.read(0.2)
            if not seen(self.terminal) and (not alive or time.monotonic() > end):
                raise AssertionError(f"not seen: {what}\n" + "\n".join(self.terminal.text()))

    def end(self) -> None:
        """End the program, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def finish(self, patience: float = 120) -> int:
        """Read until the program ends; its exit status."""
        end = time.monotonic() + patience
        while self.read(0.2):
            if time.monotonic() > end:
                raise AssertionError("it does not end\n" + "\n".join(self.terminal.text()))
        os.close(self._main)
        return self.process.wait(timeout=30)
