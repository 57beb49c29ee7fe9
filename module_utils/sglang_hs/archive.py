"""Archives of samples: many samples in one safetensors file, for object stores and file systems that hate millions of files.

An archive is an ordinary safetensors file. Sample 5's tensors are ``5.token_ids``, ``5.hidden_states``, ... with the type, shape and
bytes that they had; its metadata holds ``hs_5``: the header that the sample's own file had, so that this file can be had again to the byte.
Tensors of larger elements come first, as the format's own writers lay them, so that each begins where its type may begin in memory.

The same samples give the same bytes, whoever writes the archive and when.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Sequence, Tuple

FOLDER = "archives"  # below an output folder and below a remote
PREFIX = FOLDER + "/hidden_states-"
INDEX = "archives.json"
FORMAT = 1
BLOCK = 8 << 20
LOST = (errno.ENOENT, errno.EIO, errno.EUCLEAN, errno.EBADMSG)  # what a disk says of a file whose bytes it has no more
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}


class Spoiled(Exception):
    """A sample's file is not the one that the book has the checksum of. ``idx``: which."""

    def __init__(self, idx: int, reason: str) -> None:
        super().__init__(reason)
        self.idx = idx
        self.reason = reason


class Member(NamedTuple):
    """A sample that goes into an archive. ``path``: its file; ``sha256``: what the book says of that."""

    idx: int
    path: Path
    sha256: str


class _Piece(NamedTuple):
    """A tensor on its way: where its bytes are in the sample's file, and its entry in the archive's header."""

    item: int  # bytes of an element
    member: int
    start: int
    size: int
    key: str
    dtype: str
    shape: Sequence[int]


def write(path: Path, members: Iterable[Member], each: Callable[[], None] = lambda: None) -> Tuple[int, str]:
    """Write the archive ``path`` of ``members`` (by rising idx), reading each file once. (bytes, sha256) of the archive.

    Spoiled where a member's file has another checksum than the book, or cannot be read; OSError where the disk refuses. ``each``: called
    after each block, to end it by an exception. Memory: a block, and the headers.
    """
    chosen = sorted(members)
    pieces: List[_Piece] = []
    metadata: Dict[str, str] = {"format": "sglang-hs-archive-{}".format(FORMAT)}
    for place, member in enumerate(chosen):
        text, entries = _header(member)
        metadata["hs_{}".format(member.idx)] = text
        for name, start, size, dtype, shape in entries:
            pieces.append(_Piece(SIZES[dtype], place, start, size, "{}.{}".format(member.idx, name), dtype, shape))
    pieces.sort(key=lambda piece: (-piece.item, piece.member, piece.start))
    header: Dict[str, Any] = {"__metadata__": metadata}
    targets: List[List[Tuple[int, int, int]]] = [
        [] for _ in chosen
    ]  # of each file: (start, bytes, place in the archive's data)
    end = 0
    for piece in pieces:
        header[piece.key] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [end, end + piece.size]}
        targets[piece.member].append((piece.start, piece.size, end))
        end += piece.size
    words = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    words += b" " * (-len(words) % 8)
    base = 8 + len(words)
    with path.open("wb+", buffering=0) as handle:
        handle.write(len(words).to_bytes(8, "little") + words)
        os.posix_fallocate(handle.fileno(), 0, base + end)  # a full disk is met here, not half-way
        for place, member in enumerate(chosen):
            _pour(member, sorted(targets[place]), handle.fileno(), base, each)
        handle.seek(0)
        total = hashlib.sha256()
        for block in iter(lambda: handle.read(BLOCK), b""):
            each()
            total.update(block)
    return base + end, total.hexdigest()


def _header(member: Member) -> Tuple[str, List[Tuple[str, int, int, str, Sequence[int]]]]:
    """(the header's text, (name, start in the file, bytes, dtype, shape) of each tensor) of a sample's file; Spoiled where it is not whole."""
    try:
        with member.path.open("rb", buffering=0) as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            text = handle.read(min(length, 1 << 24)).decode()
        document, begin = json.loads(text), 8 + length
        found: List[Tuple[str, int, int, str, Sequence[int]]] = []
        here = begin
        names = [name for name in document if name != "__metadata__"]
        for name in sorted(names, key=lambda name: document[name]["data_offsets"]):
            low, high = document[name]["data_offsets"]
            if begin + low != here or high < low or document[name]["dtype"] not in SIZES:
                raise ValueError("{} is not where it should be".format(name))
            here = begin + high
            found.append((name, begin + low, high - low, document[name]["dtype"], document[name]["shape"]))
        if here != size:
            raise ValueError("{} bytes instead of {}".format(size, here))
        return text, found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Spoiled(member.idx, "its header cannot be read: {}".format(error)) from error
    except OSError as error:
        raise _unreadable(member, error) from None


def _pour(
    member: Member, targets: Sequence[Tuple[int, int, int]], fd: int, base: int, each: Callable[[], None]
) -> None:
    """Read the file from its first byte to its last, hash it, and put each tensor's bytes in their place."""
    total = hashlib.sha256()
    for here, block in _blocks(member):
        each()
        total.update(block)
        view = memoryview(block)
        for start, size, place in targets:
            low, high = max(start, here), min(start + size, here + len(block))
            if low < high:
                _write_at(fd, view[low - here : high - here], base + place + low - start)
    if total.hexdigest() != member.sha256:
        raise Spoiled(member.idx, "its bytes have changed since they were accepted (sha256)")


def _blocks(member: Member) -> Iterator[Tuple[int, bytes]]:
    """(place, bytes) of a file, block by block; Spoiled where it cannot be read to its end."""
    here = 0
    try:
        with member.path.open("rb", buffering=0) as source:
            block = source.read(BLOCK)
            while block:
                yield here, block
                here += len(block)
                block = source.read(BLOCK)
    except OSError as error:
        raise _unreadable(member, error) from None


def _unreadable(member: Member, error: OSError) -> Exception:
    """Spoiled, where the bytes are lost; else the error itself, which may pass (too many open files, a network file system)."""
    return Spoiled(member.idx, "not readable: {}".format(error)) if error.errno in LOST else error


def _write_at(fd: int, view: memoryview, place: int) -> None:
    while len(view):
        count = os.pwrite(fd, view, place)
        view, place = view[count:], place + count


def header(path: Path) -> Tuple[Dict[str, Any], int]:
    """(the header, where the data begins) of an archive."""
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        return json.loads(handle.read(length)), 8 + length


def unpack(path: Path, idx: int) -> bytes:
    """The sample's own file, as it was before it came into the archive ``path``. KeyError where it is not in it."""
    document, base = header(path)
    text = document["__metadata__"]["hs_{}".format(idx)].encode()
    single = json.loads(text)
    tensors = sorted((entry["data_offsets"][0], name) for name, entry in single.items() if name != "__metadata__")
    found = len(text).to_bytes(8, "little") + text
    with path.open("rb") as handle:
        for _, name in tensors:
            low, high = document["{}.{}".format(idx, name)]["data_offsets"]
            handle.seek(base + low)
            found += handle.read(high - low)
    return found


def index(archives: Iterable[Any], single: Sequence[int] = ()) -> Dict[str, Any]:
    """The document INDEX: which sample is in which archive. ``archives``: rows of the book, moved. ``single``: samples with a file of their own."""
    rows = [
        {"file": found.file, "bytes": found.bytes, "sha256": found.sha256, "samples": list(found.members)}
        for found in archives
    ]
    return {
        "format": FORMAT,
        "tensors": "{idx}.token_ids, {idx}.hidden_states, ...; metadata hs_{idx}",
        "archives": rows,
        "single": list(single),
    }
