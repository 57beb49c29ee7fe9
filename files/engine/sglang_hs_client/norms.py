"""How large a sample's states are: the mean L2 norm of a few of its rows, for whoever looks over a run afterwards.

Not a check (check_data and the canary are), so it may be cheap: one row in ROWS_PER, eight at most, taken from the middle of equal
parts of the sample. The first token, whose state is many times larger than all others, is among them only where it is the only one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import List, Optional

import torch

from .dumpfile import TYPES, Header

ROWS_PER, MOST_ROWS = 64, 8


def chosen(length: int) -> List[int]:
    """The rows of a sample of ``length`` tokens that are looked at, ascending."""
    count = max(1, min(MOST_ROWS, length // ROWS_PER))
    return [(2 * part + 1) * length // (2 * count) for part in range(count)]


def measure(sample: Path, header: Header) -> Optional[List[float]]:
    """Mean L2 norm of the chosen rows, one number a state: the boundaries, the final state, and the post-norm one where both are there.

    None where the file cannot be read.
    """
    try:
        found: List[float] = []
        fd = os.open(str(sample), os.O_RDONLY | os.O_CLOEXEC)
        try:
            for name in ("hidden_states", "final_post_norm"):
                entry = header.tensors.get(name)
                if entry is None or entry["dtype"] not in TYPES or not entry["shape"][0]:
                    continue
                start, stop = entry["data_offsets"]
                length, *shape = entry["shape"]
                size = (stop - start) // length  # bytes of one row
                rows = chosen(length)
                data = bytearray(b"".join(os.pread(fd, size, header.start + start + row * size) for row in rows))
                states = torch.frombuffer(data, dtype=TYPES[entry["dtype"]]).reshape(len(rows), -1, shape[-1])
                found += torch.linalg.vector_norm(states, dim=-1, dtype=torch.float32).mean(0).tolist()
        finally:
            os.close(fd)
    except (OSError, RuntimeError, ValueError):
        return None
    return found
