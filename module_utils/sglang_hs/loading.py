"""Where the loading of a server is, from its own log: it takes minutes, and nothing else tells how far it has come.

The words are SGLang's, as releases 0.4.6.post5 to 0.5.23 write them (tests/unit/data/server_logs); a log with none of them is "starting".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Iterable, NamedTuple, Optional

from .ending import read_lines

STARTING, WEIGHTS, MEMORY, GRAPHS, WARM_UP, READY = (
    "starting",
    "loading weights",
    "memory pool",
    "CUDA graphs",
    "warm-up",
    "ready",
)
STAGES = (STARTING, WEIGHTS, MEMORY, GRAPHS, WARM_UP, READY)

_BEGINS = (
    # a server that was started again writes to the same log
    (re.compile(r".*server_args="), STARTING),
    (re.compile(r"Load weight begin"), WEIGHTS),
    (re.compile(r"(Load weight end|KV Cache is allocated|Memory pool end|Using KV cache dtype)"), MEMORY),
    (re.compile(r"Capture (target verify )?(cuda|CUDA|decode|prefill).*(graph|Graph).* begin"), GRAPHS),
    (
        re.compile(r"(INFO: +Started server process|INFO: +Application startup complete|INFO: +Uvicorn running on)"),
        WARM_UP,
    ),
    (re.compile(r"The server is fired up and ready to roll"), READY),
)
# "Loading safetensors checkpoint shards:  37% Completed | 23/62 [...", "Multi-thread loading shards: ..."; one loader draws a bar
_BAR = re.compile(r".*?[Ll]oading [^:]*: +(\d+)%(?: Completed)? ?\|(?:[^|]*\|)? *(\d+)/(\d+) \[")


class Stage(NamedTuple):
    """name: one of STAGES. percent, shard, shards: of the weights, where the log shows them."""

    name: str
    percent: Optional[int] = None
    shard: Optional[int] = None
    shards: Optional[int] = None

    def __str__(self) -> str:
        if self.name != WEIGHTS or self.percent is None:
            return self.name
        return "{}: {} % (shard {} of {})".format(self.name, self.percent, self.shard, self.shards)


def stage(lines: Iterable[str]) -> Stage:
    """The furthest that the last server of a log has come. ``lines`` as :func:`ending.read_lines` gives them, without their ranks.

    Ranks write to the log in no order; what the first of them has reached is told.
    """
    found = Stage(STARTING)
    for line in lines:
        for begins, name in _BEGINS:
            if begins.match(line):
                if name == STARTING:
                    found = Stage(STARTING)
                elif STAGES.index(name) > STAGES.index(found.name):
                    found = Stage(name)
        bar = _BAR.match(line)
        if bar and STAGES.index(found.name) <= STAGES.index(WEIGHTS):
            found = Stage(WEIGHTS, *(int(number) for number in bar.groups()))
    return found


def look(log: Path) -> Stage:
    """:func:`stage` of a log; STARTING where there is none yet."""
    return stage(line for _, line in read_lines(log))
