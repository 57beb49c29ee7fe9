"""The settings of moving, and what the high-water mark means. Apart from the mover, so that a plan needs nothing of it."""

from __future__ import annotations

import os
import re
from typing import Any, Mapping, NamedTuple, Tuple

from .errors import HsError

AUTO, DOWNLOAD = "auto", "download"
NONE, SAFETENSORS = "none", "safetensors"


class HighWater:
    """How much may lie here. ``text``: "80%": the output's file system is filled so far at most, by whomever; "500": so many GB of samples wait."""

    def __init__(self, text: str) -> None:
        share = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", text.strip())
        count = re.fullmatch(r"(\d+(?:\.\d+)?) ?(?:GB)?", text.strip())
        self.share = float(share.group(1)) / 100 if share else None
        self.bytes = int(float(count.group(1)) * 1e9) if count else None
        if (
            (self.share is None and self.bytes is None)
            or self.share == 0
            or self.bytes == 0
            or (self.share or 0) > 0.99
        ):
            raise HsError(
                "hs_move_high_water holds {!r}".format(text),
                "everything: production was not touched",
                "write a share of the disk as 80% (at most 99%), or GB as 500",
            )

    def room(self, free: int, total: int, waiting: int) -> int:
        """Bytes that may still be written, below zero where it is over the mark. ``free``, ``total``: of the file system; ``waiting``: of samples here."""
        if self.share is not None:
            return free - round(total * (1 - self.share))
        assert self.bytes is not None
        return min(self.bytes - waiting, free)


def apart(to: str, output: str, untouched: str) -> None:
    """HsError where samples are to move to a path that is the output folder, lies in it or holds it: nothing would be gained, and all could go."""
    if not to.startswith("/"):
        return  # the mover looks whether what it writes there shows up here
    places = [os.path.realpath(to), os.path.realpath(output)]
    if os.path.commonpath(places) in places:
        raise HsError(
            "hs_move_to {} and hs_output_dir {} lie in each other".format(to, output),
            untouched,
            "give hs_move_to a folder of another disk, or a remote",
        )


class Move(NamedTuple):
    """Where samples move, and how: the settings of a run. to: "" = they stay. verify: auto or download. archive: none or safetensors."""

    to: str = ""
    rclone: str = "rclone"
    config: str = ""
    options: Tuple[str, ...] = ()
    high_water: str = "80%"
    verify: str = AUTO
    archive: str = NONE
    archive_bytes: int = 1 << 30

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Move":
        """Out of a JSON object with these keys; TypeError where there are others."""
        values = dict(document)
        values["options"] = tuple(values.get("options") or ())
        # one remote has one name in the book: with a slash at its end it would be another, and the index of one would lack the other's
        values["to"] = str(values.get("to") or "").rstrip("/") or str(values.get("to") or "")
        return cls(**values)
