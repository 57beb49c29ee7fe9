"""Callback: draws the hosts' progress on a terminal in place, one line a host, and takes it away before anything else is written.

An action runs in a forked worker that has no terminal. So the block is drawn in the main process: this callback, loaded once and before the
first worker, puts a ``Screen`` around the main process's standard output, and around standard error where that is the terminal too. Whatever
writes there - any callback, a warning, the message after Ctrl-C - finds the block erased.

Actions find the screen at the display, which they inherit through the fork, and send their lines through a pipe of its own. Not through the
queue that brings Ansible's own messages: its writers take a lock, and a worker that is ended by Ctrl-C while it holds the lock leaves
ansible-playbook hanging; that was seen, where lines came every second. A write to the pipe takes no lock, and is dropped rather than waited for.

Without a terminal nothing is wrapped, but each line of output is written as it ends, so that a log can be followed for hours.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from typing import Any, TextIO

from ansible.plugins.callback import CallbackBase
from ansible.utils.color import stringc
from ansible.utils.display import Display

DOCUMENTATION = """
name: hs_live
type: aggregate
short_description: One line of progress for each host, in place
description:
  - On a terminal the lines of M(hs_watch) are drawn in place. In a log M(hs_watch) writes a line now and then.
  - Works with any stdout callback, strategy and number of forks.
requirements: [enabled in ansible.cfg]
"""

MOST = (
    600  # characters of a line; a frame must be smaller than PIPE_BUF, so that the frames of several workers do not mix
)


class Screen:
    """A terminal's output stream with a block of lines at its end that is redrawn in place.

    The block is on the terminal only between two frames with nothing written in between; the next frame draws it anew, below.
    """

    def __init__(self, stream: TextIO, lock: Any) -> None:
        self._stream = stream
        self._lock = lock
        self._lines: dict[str, tuple[str, str]] = {}
        self._drawn: list[int] = []  # lengths of the lines that stand on the terminal now
        self._at_margin = True  # nobody left a line unfinished (a prompt, say)
        self._closed = False
        self._frames, self._sender = os.pipe()
        os.set_blocking(self._sender, False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def watch(self) -> None:
        """Draw what comes through the pipe, from now on."""
        threading.Thread(target=self._receive, name="hs_live", daemon=True).start()
        atexit.register(self.close)

    def send(self, host: str, line: str = "", colour: str = "") -> None:
        """Called in a worker: have ``host``'s line drawn, or, without a line, taken away. colour: one of Ansible's, or none."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._sender, json.dumps([host[:MOST], line[:MOST], colour], ensure_ascii=False).encode() + b"\n")

    def _receive(self) -> None:
        rest = b""
        while data := os.read(self._frames, 65536):
            *frames, rest = (rest + data).split(b"\n")
            for frame in frames:
                self.draw(*json.loads(frame))

    def draw(self, host: str, line: str, colour: str) -> None:
        """Draw the block with this host's line, or without it."""
        with self._lock:
            if line:
                self._lines[host] = (line, colour)
            else:
                self._lines.pop(host, None)
            self._draw()

    def close(self) -> None:
        """Nothing is drawn any more: what comes is what was under way when the play was ended."""
        with self._lock:
            self.erase()
            self._closed = True

    def write(self, text: str) -> int:
        """What everybody else writes: the block is erased first."""
        with self._lock:
            self.erase()
            if text:
                self._at_margin = text.endswith("\n")
            return self._stream.write(text)

    def erase(self) -> None:
        """Take the block away; the cursor is where the block began."""
        with self._lock:
            if not self._drawn:
                return
            width = self._size().columns
            # a terminal that was made narrower since has wrapped them
            rows = sum(max(1, -(-length // width)) for length in self._drawn)
            self._drawn = []
            self._stream.write("\r" + (f"\x1b[{rows - 1}A" if rows > 1 else "") + "\x1b[J")
            self._stream.flush()

    def _draw(self) -> None:
        size = self._size()
        shown = list(self._lines.items())
        more = len(shown) - max(size.lines - 1, 1)
        if more > 0:
            shown = shown[: -more - 1] if len(shown) > more + 1 else shown[:1]
        texts = [(f"  {host}: {line}"[: size.columns - 1], colour) for host, (line, colour) in shown]
        if len(shown) < len(self._lines):
            texts.append((f"  and {len(self._lines) - len(shown)} more hosts"[: size.columns - 1], ""))
        self.erase()
        if self._closed or not self._at_margin or not texts:
            return
        self._stream.write("\n".join(stringc(text, colour) if colour else text for text, colour in texts))
        self._stream.flush()
        self._drawn = [len(text) for text, _ in texts]

    def _size(self) -> os.terminal_size:
        with contextlib.suppress(OSError, ValueError):
            found = os.get_terminal_size(self._stream.fileno())
            if found.columns > 1:
                return found
        return os.terminal_size((80, 24))


class Beside:
    """Another stream to the same terminal: the block is erased before it is written to."""

    def __init__(self, stream: TextIO, screen: Screen) -> None:
        self._stream = stream
        self._screen = screen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Erase, then write."""
        self._screen.erase()
        return self._stream.write(text)


class CallbackModule(CallbackBase):
    """Puts the screen in place. It listens to no event."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "hs_live"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        display = Display()
        if getattr(display, "hs_screen", None) is not None:
            return
        if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") == "dumb":
            with contextlib.suppress(AttributeError):
                sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            return
        # The display's own lock, and no other: two locks could be taken in both orders, and only this one is safe in a fork.
        screen = Screen(sys.stdout, getattr(display, "_lock", None) or threading.RLock())
        if sys.stderr.isatty():
            sys.stderr = Beside(sys.stderr, screen)
        sys.stdout = screen
        screen.watch()
        display.hs_screen = screen
