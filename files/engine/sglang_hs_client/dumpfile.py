"""A dump's file: its header, read and checked without the data, and the data, read once for everything that is asked of it."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch

from .faults import SampleFault

TYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
HEADER = 8192  # bytes of a dump's header, at most, and of what a file system rounds up
BLOCK = 8 << 20  # bytes; a multiple of every element's size


@dataclass(frozen=True)
class Expected:
    """What a dump must look like. states: slots of hidden_states. dtype: as the capture names it, e.g. bfloat16."""

    states: int
    hidden_size: int
    dtype: str
    final: str

    def tensors(self, length: int) -> Dict[str, Tuple[str, List[int]]]:
        """Name -> (safetensors dtype, shape) for a sequence of ``length`` tokens."""
        dtype = NAMES[self.dtype]
        wanted = {"token_ids": ("I64", [length]), "hidden_states": (dtype, [length, self.states, self.hidden_size])}
        if self.final == "both":
            wanted["final_post_norm"] = (dtype, [length, self.hidden_size])
        return wanted

    def bytes(self, length: int) -> int:
        """Bytes of the file of a sequence of ``length`` tokens, and a little more: its header."""
        sizes = {"I64": 8, "F32": 4, "BF16": 2, "F16": 2}
        return HEADER + sum(sizes[dtype] * math.prod(shape) for dtype, shape in self.tensors(length).values())


@dataclass(frozen=True)
class Header:
    """tensors: name -> safetensors entry. start: offset of the data in the file. size: of the whole file, in bytes."""

    tensors: Dict[str, Dict[str, Any]]
    metadata: Dict[str, str]
    start: int
    size: int


def read_header(path: Path) -> Header:
    """The header of a safetensors file; SampleFault where it is not whole."""
    try:
        with path.open("rb", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, 1 << 24):
                raise ValueError("header length {} in a file of {} bytes".format(length, size))
            text = handle.read(length)
            document = json.loads(text)
            metadata = document.pop("__metadata__", {})
            _check_header_crc(length, text, metadata)
            end = max([entry["data_offsets"][1] for entry in document.values()] or [0])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SampleFault("the dump is no whole safetensors file: {}".format(error)) from error
    if 8 + length + end != size:
        raise SampleFault("the dump is cut short: {} bytes instead of {}".format(size, 8 + length + end))
    return Header(document, metadata, 8 + length, size)


def prompts_in_forward(header: Header) -> int:
    """How many prompts shared the forward that a dump of this header comes from."""
    return max(int(header.metadata.get("prompts", "1")), 1)


def _check_header_crc(length: int, text: bytes, metadata: Dict[str, str]) -> None:
    """ValueError where the header is not as the capture wrote it; files of before there were checksums pass."""
    told = metadata.get("header_crc32")
    if told is None and "crc32" not in metadata:
        return
    whole = length.to_bytes(8, "little") + text
    mark = b'"header_crc32":"'
    crc = zlib.crc32(whole.replace(mark + str(told).encode(), mark + b"00000000", 1))
    if told != "{:08x}".format(crc):
        raise ValueError("the header has the checksum {:08x}, it says {}".format(crc, told))


def check_header(path: Path, length: int, name: str, expected: Expected) -> Header:
    """The header, after comparing tensors, shapes, types and the sequence's name with what they must be."""
    header = read_header(path)
    for tensor, (dtype, shape) in expected.tensors(length).items():
        entry = header.tensors.get(tensor)
        if entry is None:
            raise SampleFault("the dump has no {}".format(tensor))
        if entry["dtype"] != dtype or entry["shape"] != shape:
            raise SampleFault(
                "{} is {} {} instead of {} {}".format(tensor, entry["dtype"], entry["shape"], dtype, shape)
            )
    if header.metadata.get("name", name) != name:
        raise SampleFault("the dump is of another sequence ({})".format(header.metadata["name"]))
    return header


def check_data(path: Path, header: Header, ids: List[int]) -> str:
    """Read the file once: token ids equal ``ids``, every state finite, none all zero, the capture's CRC-32. Returns the file's sha256.

    Memory: one block.
    """
    total = hashlib.sha256()
    spans = sorted((entry["data_offsets"], name, entry["dtype"]) for name, entry in header.tensors.items())
    block = memoryview(
        bytearray(min(BLOCK, header.size + -header.size % 8))
    )  # a small sample does not pay for a large block
    crc = 0  # of the data, without the header
    with path.open("rb", buffering=0) as source:

        def read(size: int) -> memoryview:
            """The next ``size`` bytes at most, hashed on the way; valid until the next call."""
            count = source.readinto(block[:size])
            if not count:
                raise SampleFault("the dump ended while it was read")
            total.update(block[:count])
            return block[:count]

        left = header.start
        while left:
            left -= len(read(min(BLOCK, left)))
        for (start, stop), name, dtype in spans:
            left = stop - start
            found = bytearray()
            has_value = False
            while left:
                part = read(min(BLOCK, left))
                left -= len(part)
                crc = zlib.crc32(part, crc)
                if name == "token_ids":
                    found += part
                elif dtype in TYPES:
                    # a short read may split an element; the kernel gives whole blocks of a regular file but for the last
                    finite, other = _look(torch.frombuffer(part, dtype=TYPES[dtype]))
                    if not finite:
                        raise SampleFault("{} holds values that are not finite".format(name))
                    has_value = has_value or other
            if name == "token_ids":
                _check_ids(bytes(found), ids)
            elif dtype in TYPES and not has_value:
                raise SampleFault("{} is all zero".format(name))
        if header.metadata.get("crc32") != "{:08x}".format(crc):
            raise SampleFault(
                "the dump's data has the checksum {:08x}, the capture wrote {}".format(
                    crc, header.metadata.get("crc32")
                )
            )
    return total.hexdigest()


def _look(values: torch.Tensor) -> Tuple[bool, bool]:
    """(all are finite, one is not zero) of a flat tensor, in one pass: ten times as fast as ``isfinite`` and ``any`` one after the other.

    The least and the greatest value are not finite if any is: an infinity is one of them, and a NaN goes before every number.
    """
    least, greatest = (float(end) for end in torch.aminmax(values))
    return math.isfinite(least) and math.isfinite(greatest), bool(least or greatest)


def _check_ids(found: bytes, ids: List[int]) -> None:
    words = array("q")
    words.frombytes(found)
    if words.tolist() != ids:
        raise SampleFault("the dump's token ids are not the sample's")


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files hold the same bytes. Memory: two blocks."""
    with one.open("rb") as first, other.open("rb") as second:
        while True:
            left, right = first.read(BLOCK), second.read(BLOCK)
            if left != right:
                return False
            if not left:
                return True


def file_sha256(path: Path) -> str:
    """sha256 of a file's bytes."""
    total = hashlib.sha256()
    with path.open("rb") as handle:
        for block in iter(lambda: handle.read(BLOCK), b""):
            total.update(block)
    return total.hexdigest()
