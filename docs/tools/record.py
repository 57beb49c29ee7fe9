"""Record a command on a real pseudo-terminal: an animated SVG of chosen moments, or its lines, as they were shown.

    docs/tools/record.py --svg docs/img/live.svg -- ansible-playbook playbooks/extract.yml -i inventory/local

Nothing in the picture is typed by hand. A moment is kept when something was written after a pause; pauses are played as long as they were,
up to ``--longest`` seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from terminal import Cell, Session, Terminal

WIDTH, HEIGHT, MARGIN = 7.8, 17, 14  # of a character, of a line, around the picture; pixels
PAPER, INK = "#16181d", "#d7dae0"
COLOURS = {
    "30": "#6b7280",
    "31": "#f07178",
    "32": "#9ccc65",
    "33": "#e6c06a",
    "34": "#82aaff",
    "35": "#c792ea",
    "36": "#6fc3df",
}

Frame = tuple[float, list[list[Cell]]]


def frames(session: Session, columns: int, lines: int, pause: float) -> Iterator[Frame]:
    """(seconds since the start, screen) each time when nothing more was written for ``pause`` seconds."""
    terminal = Terminal(columns, lines)
    for number, (at, text) in enumerate(session.seen):
        terminal.feed(text)
        following = session.seen[number + 1][0] if number + 1 < len(session.seen) else at + pause
        if following - at >= pause:
            yield at, [list(row) for row in terminal.shown()]


def thinned(found: list[Frame], most: int) -> list[Frame]:
    """At most ``most`` of them, those that differ most in time from the one before; the first and the last stay."""
    found = list(found)
    while len(found) > most:
        gaps = [(found[number + 1][0] - found[number - 1][0], number) for number in range(1, len(found) - 1)]
        found.pop(min(gaps)[1])
    return found


def svg(found: list[Frame], columns: int, lines: int, longest: float) -> str:
    """The frames one after the other, for ever."""
    spans = [min(after[0] - before[0], longest) for before, after in zip(found, found[1:])] + [longest]
    total = sum(spans)
    width, height = columns * WIDTH + 2 * MARGIN, lines * HEIGHT + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"<style>text{{font:13px monospace;white-space:pre;fill:{INK}}}g{{visibility:hidden;animation:{total:.1f}s step-end infinite}}",
    ]
    begun = 0.0
    for number, span in enumerate(spans):
        start, end = 100 * begun / total, 100 * (begun + span) / total
        before = "0%{visibility:hidden}" if number else ""
        after = f"{end:.2f}%{{visibility:hidden}}" if number < len(spans) - 1 else ""
        out.append(f"@keyframes f{number}{{{before}{start:.2f}%{{visibility:visible}}{after}}}")
        begun += span
    out.append(f'</style><rect width="100%" height="100%" rx="8" fill="{PAPER}"/>')
    for number, (_, rows) in enumerate(found):
        # where nothing is animated the last one is shown
        shown = ";visibility:visible" if number == len(found) - 1 else ""
        out.append(f'<g style="animation-name:f{number}{shown}">')
        for row, cells in enumerate(rows):
            if cells:
                out.append(f'<text x="{MARGIN}" y="{MARGIN + (row + 1) * HEIGHT - 4}">{"".join(_runs(cells))}</text>')
        out.append("</g>")
    return "\n".join([*out, "</svg>"]) + "\n"


def _runs(cells: list[Cell]) -> Iterator[str]:
    """The row's characters, those of one colour together."""
    start = 0
    for end in range(1, len(cells) + 1):
        if end == len(cells) or cells[end].colour != cells[start].colour:
            text = escape("".join(cell.text for cell in cells[start:end]))
            colour = COLOURS.get(cells[start].colour.split(";")[-1])
            yield f'<tspan fill="{colour}">{text}</tspan>' if colour else text
            start = end


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--svg", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=120)
    parser.add_argument("--lines", type=int, default=24)
    parser.add_argument("--frames", type=int, default=24, help="how many moments at most")
    parser.add_argument("--longest", type=float, default=2.0, help="seconds that a moment is shown at most")
    parser.add_argument("--hide", default="", help="FOLDER=NAME: a folder of this machine, and what to show instead")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    env = {**os.environ, "TERM": "xterm-256color"}
    session = Session(given.command, given.columns, given.lines, env)
    status = session.finish(patience=3600)
    folder, _, name = given.hide.partition("=")
    if folder:
        session.seen = [(at, text.replace(folder, name)) for at, text in session.seen]
    kept = thinned(list(frames(session, given.columns, given.lines, 0.2)), given.frames)
    given.svg.write_text(svg(kept, given.columns, given.lines, given.longest))
    print("\n".join(session.terminal.text()))
    return status


if __name__ == "__main__":
    sys.exit(main())
