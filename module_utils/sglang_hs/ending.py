"""Why a server ended, from its log: the exception that started it, not what its other processes said about it afterwards.

A server is many processes that write to one log. When one of them fails, the others fail because of it - closed connections, a
SIGQUIT from the child, "Killed" - and theirs are the last lines. So the first failure that is nobody else's consequence is told, with
the line of code that raised it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Tuple

TAIL = 1 << 20  # bytes of a log that are read: several ranks' tracebacks, and the help text before an argument's error
LONGEST = 400  # characters of an exception's text that are told

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STAMP = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d((?: \w+)*)\] ?")
# Lines that say nothing of how the server is doing: where a warning stands, a traceback's frames and marks.
_NOISE = re.compile(
    r"\s*(warnings\.warn\(|File \"|\^+\s*$|~+|During handling|The above exception|Traceback)|.*Ignore import error"
)

_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+), in (.+)')
# what a traceback ends with: the class's name, dotted or not, and its text
_RAISED = re.compile(r"[A-Za-z_][\w.]*(: .*)?$")
_CHAINED = re.compile(r"(During handling of the above exception|The above exception was the direct cause)")

# What one process says when another one failed, or when it is told to end.
_CONSEQUENCE = re.compile(
    r"(asyncio\.\S*)?(EOFError|BrokenPipeError|ConnectionResetError|ConnectionRefusedError|KeyboardInterrupt|SystemExit|CancelledError"
    r"|TimeoutError)"
    r"|.*([Cc]onnection (closed|reset) by peer|[Bb]roken pipe|[Tt]imed? ?out|remote process exited|TCPStore|socketPoll|watchdog thread)"
    r"|.*(Rank \d+ scheduler (died|is dead)|Initialization failed\. Please see the error messages above|[Ss][Ii][Gg][Qq][Uu][Ii][Tt])"
)
# Ends without a traceback: argparse, the interpreter, C++, the port.
_PLAIN = re.compile(
    r"(.{0,120}: error: .*|Fatal Python error: .*|terminate called after .*|.*[Ss]egmentation fault.*|ERROR: +\[Errno \d+\].*)"
)
_NO_PORT = re.compile(r"ERROR: +\[Errno \d+\] error while attempting to bind")
# What the parent says of a child that was killed; the only word on it.
_CHILD = re.compile(
    r".*?(Rank \d+ scheduler (?:died|is dead).*?\(exit code: -?\d+\)|Subprocess \S+ \(pid=\d+\) crashed with exit code -?\d+)"
)
_CHILD_FAILED = re.compile(r".*[Ss][Ii][Gg][Qq][Uu][Ii][Tt]")
KILLED = "killed from outside (kill -9, or the kernel for want of memory: dmesg -T tells)"
# What a server says while it serves, and while it cleans up.
_ROUTINE = re.compile(
    r"(INFO: +\S+ - \"|Prefill batch|Decode batch|kill_process_tree called|Sleeping \d+ seconds before crash|No live scheduler|Killed$)"
)
# Marks of one life of a server in a log that several have written to.
_BORN = re.compile(r".*server_args=")
_OVER = re.compile(r".*(Finished server process|Application shutdown complete)")


class _Raised(NamedTuple):
    """An exception of the log: its line, where it was raised, and whether a scheduler itself reported it."""

    text: str
    where: str
    reported: bool


# (rank, text): "TP0"; "" of a message that names no rank; None of a line without a time stamp, which goes on with a message
Line = Tuple[Optional[str], str]


def read_lines(log: Path, tail: int = TAIL) -> List[Line]:
    """The log's last ``tail`` bytes without time stamps and colours; [] where there is no log. A progress bar rewrites its line with
    carriage returns; each state of it is a line here."""
    try:
        with open(str(log), "rb") as handle:
            handle.seek(max(0, os.path.getsize(str(log)) - tail))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    found: List[Line] = []
    for raw in re.split(r"[\r\n]+", text):
        line = _COLOUR.sub("", raw)
        stamp = _STAMP.match(line)
        found.append((stamp.group(1).strip(), line[stamp.end() :]) if stamp else (None, line))
    return found


def last_lines(log: Path, count: int = 12) -> List[str]:
    """The last lines of a server's log that say something, without time stamps, colours and a traceback's frames."""
    said = [line.rstrip()[:300] for _, line in read_lines(log, 65536) if not _NOISE.match(line)]
    return [line for line in said if line.strip()][-count:]


def why_ended(log: Path, code: Optional[Any] = None) -> str:
    """What a dead server's log says of its end, in one line. ``code``: its exit status, where known (128 + the signal's number)."""
    lines = read_lines(log)
    for life in _lives(lines):
        found = _cause(life)
        if found:
            return found
    killed = "it was {}; ".format(KILLED) if code in (137, -9) else ""
    last = [line for line in last_lines(log, 200) if not _CONSEQUENCE.match(line) and not _ROUTINE.match(line)]
    if not last:
        return killed + ("its log says nothing of it" if last_lines(log) else "nothing was logged")
    return "{}its log names no error, its last lines: {}".format(killed, " | ".join(line[:160] for line in last[-3:]))


def failed_while_alive(log: Path) -> str:
    """The failure that a server reported and does not end of - a scheduler's exception, a port that is taken; "" where there is none."""
    lines = _lives(read_lines(log))[-1]
    own = [raised for raised in _raised(lines) if raised.reported and not _CONSEQUENCE.match(raised.text)]
    if own:
        return own[0].text + own[0].where
    bound = [line.strip() for _, line in lines if _NO_PORT.match(line)]
    return bound[-1][:LONGEST] if bound else ""


def _lives(lines: List[Line]) -> List[List[Line]]:
    """The log's last life to look at first, then with what came just before it: who fails early never says that he was born."""
    born = max((number for number, (_, line) in enumerate(lines) if _BORN.match(line)), default=0)
    over = max((number for number, (_, line) in enumerate(lines) if number > born and _OVER.match(line)), default=None)
    return ([lines[over + 1 :]] if over is not None else []) + [lines[born:]]


def _cause(lines: List[Line]) -> str:
    """The failure that is nobody else's consequence; else that a process was killed, with what others said of it; "" where none is named."""
    found = _raised(lines)
    own = [raised for raised in found if not _CONSEQUENCE.match(raised.text)]
    reported = [raised for raised in own if raised.reported]
    if own:
        # schedulers report in the order of their ends: the first pulled down the others. What nobody caught comes last.
        chosen = reported[0] if reported else own[-1]
        return chosen.text + chosen.where
    plain = [line.strip() for _, line in lines if _PLAIN.match(line)]
    if plain:
        return plain[-1][:LONGEST]
    for _, line in lines:
        child = _CHILD.match(line)
        if child:
            return child.group(1) + (": " + KILLED if re.search(r"-9\)?$", child.group(1)) else "")
    first = found[0].text[:160] + found[0].where if found else ""
    if any(_CHILD_FAILED.match(line) for _, line in lines):
        return "one of its processes ended without a word: {}{}".format(
            KILLED, "; what the others said of it: " + first if first else ""
        )
    return first


def _raised(lines: List[Line]) -> List[_Raised]:
    """Every exception whose traceback stands in the log, in order; of a chain the last one."""
    found: List[_Raised] = []
    opened: Optional[Tuple[str, bool]] = None  # (rank, reported) of the traceback that is open
    where = ""
    chained = False
    for number, (rank, line) in enumerate(lines):
        if "Traceback (most recent call last)" in line:
            # a chained traceback goes on where the one before it was reported
            opened = opened if chained and opened else (rank or "", "hit an exception" in line)
            where = ""
            continue
        if opened is None:
            continue
        frame = _FRAME.match(line)
        if frame:
            code = lines[number + 1][1].strip() if number + 1 < len(lines) else ""
            where = " ({}{}:{} in {}{})".format(
                opened[0] + ", " if opened[0] else "",
                os.path.basename(frame.group(1)),
                frame.group(2),
                frame.group(3),
                ": " + code[:120] if code and not code.startswith(("raise ", "File ")) else "",
            )
        elif _CHAINED.match(line):
            chained = True
        elif where and _RAISED.match(line):
            text = line.strip()
            following = lines[number + 1][1].strip() if number + 1 < len(lines) else ""
            if text.endswith(":") and following:
                text += " " + following
            if chained and found:
                found.pop()
            chained = False
            found.append(_Raised(text[:LONGEST], where, opened[1]))
            where = ""
        elif rank is not None:
            opened, chained = None, False  # somebody's next message
    return found
