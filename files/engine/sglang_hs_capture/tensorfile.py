"""The safetensors layout, written straight from the capture's own buffers: header, then the raw bytes, no second copy."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import zlib
from concurrent.futures import Executor, wait
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch

Buffer = Union[bytes, memoryview]

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}

UNKNOWN = "00000000"
HEADER_CRC = b'"header_crc32":"'
BLOCK = 4 << 20  # bytes whose checksum is one piece of work
SUMMERS = 2  # threads that compute checksums while a third one writes: a write is faster than one CRC-32
POLYNOMIAL = 0xEDB88320  # of CRC-32, the lowest power in the highest bit


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
    with _written(path) as fd:
        for piece in pieces:
            _write_all(fd, memoryview(piece).cast("B"))


def write_summed(
    path: Path, start: Callable[[str], bytes], pieces: List[Buffer], summers: Executor, used: Optional[Path] = None
) -> None:
    """As :func:`write_whole`, for data whose header holds its checksum: computed in ``summers``' threads while the data is written.

    ``start(crc32)`` makes the header; its length must not depend on the checksum (eight hex digits). It is written last.
    ``used``: a file that nobody wants any more, which becomes this one. Its pages are there: a file system in memory would have to find and
    clear new ones, a third of the time of a write.
    """
    blocks = [block for piece in pieces for block in _blocks(piece)]
    place = len(start(UNKNOWN))
    # zlib and write both let go of the interpreter's lock: neither waits for the other, nor the forward for either
    sums = [summers.submit(zlib.crc32, block) for block in blocks]
    try:
        with _written(path, used) as fd:
            os.ftruncate(fd, place + sum(map(len, blocks)))  # never more than before while it is written
            os.lseek(fd, place, os.SEEK_SET)
            for block in blocks:
                _write_all(fd, block)
            whole = 0
            for block, crc in zip(blocks, sums):
                whole = combined(whole, crc.result(), len(block))
            head = start("{:08x}".format(whole))
            assert len(head) == place, "the header's length depends on the checksum"
            os.lseek(fd, 0, os.SEEK_SET)
            _write_all(fd, memoryview(head))
    finally:
        # after an error too: whoever comes back from here may overwrite the data, and nobody reads it any more
        for crc in sums:
            crc.cancel()
        wait(sums)


@contextlib.contextmanager
def _written(path: Path, used: Optional[Path] = None) -> Iterator[int]:
    """A file under a temporary name, renamed to ``path`` at the end, gone after an error. It is empty, or ``used`` if that is still there."""
    temporary = path.with_name(".{}.{}.tmp".format(path.name, os.getpid()))
    anew = os.O_TRUNC
    if used is not None:
        with contextlib.suppress(OSError):
            os.replace(str(used), str(temporary))
            anew = 0
    fd = os.open(str(temporary), os.O_WRONLY | os.O_CREAT | anew | os.O_CLOEXEC, 0o600)
    try:
        try:
            yield fd
        finally:
            os.close(fd)
        os.replace(str(temporary), str(path))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(str(temporary))
        raise


def _write_all(fd: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(fd, view) :]


def _blocks(piece: Buffer) -> Iterator[memoryview]:
    view = memoryview(piece).cast("B")
    for begin in range(0, len(view), BLOCK):
        yield view[begin : begin + BLOCK]


def combined(first: int, second: int, length: int) -> int:
    """CRC-32 of two strings one after the other from the CRC-32 of each; ``length``: of the second, in bytes."""
    return _product(_shift(length), first) ^ second


@functools.lru_cache(maxsize=64)
def _shift(length: int) -> int:
    """x to the power of 8 * length, modulo the polynomial: what ``length`` further bytes do to a checksum."""
    power, result, bits = 1 << 30, 1 << 31, 8 * length  # x, 1
    while bits:
        if bits & 1:
            result = _product(power, result)
        power = _product(power, power)
        bits >>= 1
    return result


def _product(left: int, right: int) -> int:
    """The product of two polynomials over GF(2), modulo CRC-32's; bit 31 is the power 0."""
    result = 0
    for bit in range(31, -1, -1):
        if left >> bit & 1:
            result ^= right
        right = right >> 1 ^ (POLYNOMIAL if right & 1 else 0)
    return result
