"""What every measurement shares: where it may write, how often it looks, and what it says at its end.

A measurement is one file in bench/measures. Its docstring is its explanation in docs/performance.md; it has

    PYTHON   "controller" or "engine": who runs it
    ORDER    its place in the table
    run      ``run(place)`` yields Figures; a figure's name is the file's, or begins with it and a comma
    WITH     instead of PYTHON and run: the measurement in whose run this one's figures come about, too
    LIMIT    what keeps a figure from its goal, with the proof, where one is missed (optional)

Whatever else it needs it imports in ``run``: the file itself is read by the controller's Python, which has no torch.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOISE = 0.2  # a spread above it, with the goal inside, says nothing
DISTURBED = 0.15  # part of the processors that others may use in a round


@dataclass(frozen=True)
class Goal:
    """What a figure must be: ``word`` is "at least" or "at most"."""

    word: str
    bound: float

    def holds(self, figure: float) -> bool:
        """Whether the figure is good enough."""
        return figure >= self.bound if self.word == "at least" else figure <= self.bound


@dataclass(frozen=True)
class Figure:
    """One line of the table. value: ours, median, in ``unit``. other: what it is compared with, likewise, None without one.

    ratio: median of the rounds' ratios (both sides of a round are measured one after the other), None without a comparison.
    median, spread: of what is judged (the ratio, or the value); spread from the first to the third quartile, as a part of the median.
    met: None where the spread is so large that the goal could be met or missed.
    """

    name: str
    value: float
    unit: str
    ratio: float | None
    compared_with: str
    goal: str
    met: bool | None
    repeats: int
    median: float
    spread: float
    command: str
    other: float | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """As report.json has it."""
        return asdict(self)


@dataclass(frozen=True)
class Place:
    """Where a measurement works: ``key`` is its own name, ``disk`` and ``memory`` are folders that go when it ends."""

    key: str
    disk: Path
    memory: Path

    @property
    def command(self) -> str:
        """How to measure this again."""
        return f"make bench ONLY={self.key}"

    def also(self, key: str) -> Place:
        """The same place, for the figures of a measurement that is made WITH this one."""
        return Place(key, self.disk, self.memory)

    def ratio(
        self,
        name: str,
        unit: str,
        ours: Sequence[float],
        theirs: Sequence[float],
        goal: Goal,
        compared_with: str,
        inverse: bool = False,
        note: str = "",
    ) -> Figure:
        """Rounds of two sides: the ratio ours / theirs is judged (``inverse``: theirs / ours, how many times faster ours is)."""
        pairs = list(zip(ours, theirs, strict=True))
        ratios = [their / our if inverse else our / their for our, their in pairs]
        middle, spread, met = judge(ratios, goal)
        told = f"{goal.word} {goal.bound:g}x"
        value, other = statistics.median(ours), statistics.median(theirs)
        return Figure(
            name, value, unit, middle, compared_with, told, met, len(pairs), middle, spread, self.command, other, note
        )

    def absolute(
        self, name: str, unit: str, values: Sequence[float], goal: Goal, compared_with: str = "", note: str = ""
    ) -> Figure:
        """A figure that has a goal of its own."""
        middle, spread, met = judge(values, goal)
        told = f"{goal.word} {goal.bound:g} {unit}"
        return Figure(
            name, middle, unit, None, compared_with, told, met, len(values), middle, spread, self.command, None, note
        )


def judge(values: Sequence[float], goal: Goal) -> tuple[float, float, bool | None]:
    """(median, spread, whether the goal is met); None where the quartiles disagree and lie far from each other."""
    middle = statistics.median(values)
    low, high = quartiles(values)
    spread = (high - low) / abs(middle) if middle else 0.0
    if spread > NOISE and goal.holds(low) != goal.holds(high):
        return middle, spread, None
    return middle, spread, goal.holds(middle)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; of a single value, that value."""
    if len(values) < 2:
        return values[0], values[0]
    parts = statistics.quantiles(values, n=4, method="inclusive")
    return parts[0], parts[2]


def rounds(count: int, *sides: Callable[[], float], warm: int = 1, patience: float = 45.0) -> list[list[float]]:
    """What each side returns, ``count`` times, in turns; a round more in which the caches warm. Every other round goes backwards.

    A round begins when the machine is quiet, and one in which somebody else used much of the processors does not count, as long as there
    is ``patience`` (seconds, for all rounds together). After that every round counts, and the spread tells.
    """
    kept: list[list[float]] = []
    disturbed: list[list[float]] = []
    until = time.monotonic() + patience
    number = 0
    while len(kept) + (0 if time.monotonic() < until else len(disturbed)) < count:
        order = list(enumerate(sides))
        if number >= warm:
            wait_quiet(until)
        watch = Watch()
        found = dict((place, side()) for place, side in (order if number % 2 else reversed(order)))
        if number >= warm:
            (disturbed if watch.others() > DISTURBED else kept).append([found[place] for place, _ in order])
        number += 1
    if len(kept) < count:
        print(f"{count - len(kept)} of {count} rounds were disturbed by other work on this machine", file=sys.stderr)
        kept = (kept + disturbed)[:count]
    return [list(values) for values in zip(*kept, strict=True)]


class Watch:
    """How much of the processors others used since it was made."""

    def __init__(self) -> None:
        self.began = self.now()

    @staticmethod
    def now() -> tuple[float, float, float]:
        """Seconds: by the clock, busy on all processors, and of those ours with the processes that we waited for."""
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]]
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk
        times = os.times()
        return time.monotonic(), busy, times.user + times.system + times.children_user + times.children_system

    def others(self) -> float:
        """Their part of all processors' time, from 0 to 1."""
        clock, busy, ours = (after - before for before, after in zip(self.began, self.now(), strict=True))
        return (busy - ours) / max(clock, 0.001) / (os.cpu_count() or 1)


def wait_quiet(until: float) -> None:
    """Until nobody used the processors for a fifth of a second, or it is ``until`` by the monotonic clock."""
    while time.monotonic() < until:
        watch = Watch()
        time.sleep(0.2)
        if watch.others() <= DISTURBED:
            return


def seconds(work: Callable[[], Any]) -> float:
    """How long ``work`` takes, by the clock."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Clock:
    """Adds up this process's processor time (all threads) over rounds, for a note beside times by the clock."""

    def __init__(self) -> None:
        self.spent: list[float] = []

    def around(self, work: Callable[[], float]) -> Callable[[], float]:
        """``work``, watched."""

        def watched() -> float:
            before = time.process_time()
            value = work()
            self.spent.append(time.process_time() - before)
            return value

        return watched

    def each(self, parts: int) -> float:
        """Median processor seconds of one of ``parts`` parts of a round."""
        return statistics.median(self.spent) / parts


def filesystem(path: Path) -> str:
    """The type of the file system that ``path`` lies on."""
    done = subprocess.run(["df", "--output=fstype", str(path)], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]
