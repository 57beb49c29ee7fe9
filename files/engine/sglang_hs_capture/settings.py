"""What the operator asked for, read from the environment once and checked."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Tuple

FINALS = ("pre_norm", "post_norm", "both")


@dataclass(frozen=True)
class Settings:
    """dump_dir: folder of the exchange. boundaries: layer numbers whose *input* is captured. final: which final state.

    buffers: host buffers of one forward each; a forward waits while all of them are still being written.
    """

    dump_dir: Path
    boundaries: Tuple[int, ...]
    final: str = "pre_norm"
    buffers: int = 2

    @property
    def slots(self) -> int:
        """Number of states a token has in ``hidden_states``: the boundaries and one final state."""
        return len(self.boundaries) + 1


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings in ``environment``; a ValueError says which variable is wrong and how."""
    folder = environment.get("SGLANG_HS_DUMP_DIR", "")
    if not os.path.isabs(folder):
        raise ValueError("SGLANG_HS_DUMP_DIR must be an absolute path, got {!r}".format(folder))
    text = environment.get("SGLANG_HS_BOUNDARIES", "3,31,59")
    try:
        boundaries = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            "SGLANG_HS_BOUNDARIES must be numbers with commas between them, got {!r}".format(text)
        ) from None
    if sorted(set(boundaries)) != list(boundaries) or boundaries[0] < 0:
        raise ValueError("SGLANG_HS_BOUNDARIES must rise and not be negative, got {!r}".format(text))
    final = environment.get("SGLANG_HS_FINAL", "pre_norm")
    if final not in FINALS:
        raise ValueError("SGLANG_HS_FINAL must be one of {}, got {!r}".format(", ".join(FINALS), final))
    count = environment.get("SGLANG_HS_BUFFERS", "2")
    if not count.isdigit() or not 1 <= int(count) <= 64:
        raise ValueError("SGLANG_HS_BUFFERS must be a number from 1 to 64, got {!r}".format(count))
    return Settings(Path(folder), boundaries, final, int(count))


def helper_sha256() -> str:
    """One hash over this package's own files, so that an output can say which capture made it."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()
