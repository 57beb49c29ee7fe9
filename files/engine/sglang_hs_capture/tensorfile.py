"""The safetensors layout, written straight from the capture's own buffers: header, then the raw bytes, no second copy."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Union

import torch

Buffer = Union[bytes, memoryview]

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}

UNKNOWN = "00000000"
HEADER_CRC = b'"header_crc32":"'


def header(tensors: Sequence[Tuple[str, str, Sequence[int], int]], metadata: Dict[str, str]) -> bytes:
    """The first bytes of a file: length (8 bytes, little endian) and JSON, padded so that the data starts on 8 bytes.

    The JSON's metadata gets ``header_crc32``, over these very bytes with zeros in its own place: a changed bit shows without the data.
    ``tensors``: name, safetensors dtype name, shape and size in bytes of each, in the order in which the bytes follow.
    """
    entries: Dict[str, object] = {"__metadata__": dict(metadata, header_crc32=UNKNOWN)}
    offset = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return whole.replace(HEADER_CRC + UNKNOWN.encode(), HEADER_CRC + checksum([whole]).encode(), 1)


def checksum(pieces: Sequence[Buffer]) -> str:
    """CRC-32 (hex) of ``pieces`` one after the other: shows a changed bit on the way to whoever reads the file."""
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return "{:08x}".format(value)


def as_bytes(buffer: torch.Tensor) -> memoryview:
    """The bytes of a flat uint8 tensor in host memory, not copied."""
    return memoryview(buffer.numpy())


def write_whole(path: Path, pieces: List[Buffer]) -> None:
    """Write ``pieces`` one after the other under a temporary name and rename: a reader sees the whole file or none.

    Not fsynced: the exchange folder is scratch (mostly memory), and its reader makes the bytes durable in their final place.
    """
    temporary = path.with_name(".{}.{}.tmp".format(path.name, os.getpid()))
    fd = os.open(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            for piece in pieces:
                view = memoryview(piece).cast("B")
                while len(view):
                    view = view[os.write(fd, view) :]
        finally:
            os.close(fd)
        os.replace(str(temporary), str(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(str(temporary))
        raise
