"""The data set of prompts: read row by row (memory stays flat), each row checked, every fault told in one line.

A row is a mapping with ``input_ids`` (token ids) and, if training masks its loss, ``loss_mask`` (0 or 1 for each token); other
columns are passed over, but a ``seq_len`` must be true. Three forms are read: JSON lines, Parquet, and an arrow folder as
``datasets.save_to_disk`` leaves it (so speculators' prepared data, and this project's own output). The last two need pyarrow.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Type, Union

from .errors import HsError

# what SGLang brings along, where it does: a plan reads hundreds of megabytes
try:
    import orjson as _orjson
except ImportError:
    _orjson = None
try:
    import msgspec as _msgspec
except ImportError:
    _msgspec = None

UNTOUCHED = "everything: the data set was only read"
_BITS = frozenset((0, 1))
COLUMNS = ("input_ids", "loss_mask", "seq_len")


def sequence_name(ids: Sequence[int]) -> str:
    """Name of a token sequence: sha256 hex of the ids as little-endian int64; the capture in the engine computes the same."""
    words = array("q", ids)
    if sys.byteorder == "big":
        words.byteswap()
    return hashlib.sha256(words.tobytes()).hexdigest()


@dataclass(frozen=True)
class Limits:
    """What a row must respect. max_prompt: tokens that the server takes. cut_to: longer rows are cut to it (None: never)."""

    vocab_size: int
    max_prompt: int
    cut_to: Optional[int] = None


@dataclass(frozen=True)
class Row:
    """One sample, cut and checked. idx: row number from 0. loss_mask: as long as input_ids, None where the row has none."""

    idx: int
    input_ids: List[int]
    loss_mask: Optional[List[int]]

    @property
    def name(self) -> str:
        """See :func:`sequence_name`."""
        return sequence_name(self.input_ids)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be extracted. where: file:line, or file and row. reason: the fault."""

    idx: int
    where: str
    reason: str

    def __str__(self) -> str:
        return "{}: {}".format(self.where, self.reason)


@dataclass
class Scan:
    """What a pass over the whole data set found. Lengths are in tokens, after the cut.

    hist: upper edge (a power of two) -> number of samples at or below it and above the one before.
    bad: the first faults only; bad_total counts them all. sha256: of the data set's bytes.
    """

    path: str
    samples: int = 0
    tokens: int = 0
    cut: int = 0
    masked: int = 0
    min_length: int = 0
    max_length: int = 0
    hist: Dict[int, int] = field(default_factory=dict)
    bad: List[BadRow] = field(default_factory=list)
    bad_total: int = 0
    sha256: str = ""

    def facts(self) -> Dict[str, Any]:
        """The same as plain JSON types."""
        facts = dict(vars(self))
        facts["bad"] = [str(bad) for bad in self.bad]
        facts["hist"] = {str(edge): self.hist[edge] for edge in sorted(self.hist)}
        return facts


def rows(
    path: Union[str, Path], limits: Limits, wanted: Optional[Callable[[int], bool]] = None
) -> Iterator[Union[Row, BadRow]]:
    """Every row of the data set in order, checked and cut. HsError where the data set as a whole cannot be read.

    ``wanted(idx)``, asked once for each row in order: the others are passed over unparsed.
    """
    for idx, where, record in _records(Path(path), wanted):
        yield check(idx, where, record, limits)


def scan(
    path: Union[str, Path],
    vocab_size: int,
    max_prompt: int,
    cut_to: Optional[int] = None,
    limit_bad: int = 20,
    each: Optional[Callable[[Union[Row, BadRow]], None]] = None,
    lengths: "Optional[array[int]]" = None,
) -> Scan:
    """Read the whole data set once and sum it up; ``each`` is called with every row (the client fills its manifest so).

    ``lengths`` gets the tokens of each row, 0 of one that is no sample.
    Without ``each`` a row that is plainly right is counted and not made; whatever is the matter with another is told by :func:`check`.
    Memory: one row.
    """
    limits = Limits(vocab_size, max_prompt, cut_to)
    result = Scan(str(path))
    plain: Dict[Tuple[int, bool], int] = {}  # what there is to count of such rows -> how many there are: lengths repeat
    with ThreadPoolExecutor(1) as beside:
        total = beside.submit(digest, path)
        for idx, (file, word, number, raw, source) in enumerate(_raw_rows(Path(path))):
            told = source.brief(raw, limits) if each is None else None
            if told is not None:
                plain[told] = plain.get(told, 0) + 1
                if lengths is not None:
                    lengths.append(min(told[0], cut_to or told[0]))
                continue
            where = "{}{}{}".format(file.name, word, number)
            record = _record(idx, where, raw, source)
            row = check(idx, where, record, limits)
            if each is not None:
                each(row)
            if lengths is not None:
                lengths.append(0 if isinstance(row, BadRow) else len(row.input_ids))
            if isinstance(row, BadRow):
                result.bad_total += 1
                if len(result.bad) < limit_bad:
                    result.bad.append(row)
                continue
            count(result, len(row.input_ids), len(record["input_ids"]), row.loss_mask is not None)
        for (tokens, masked), times in plain.items():
            count(result, min(tokens, cut_to or tokens), tokens, masked, times)
        result.sha256 = total.result()
    if not result.samples and not result.bad_total:
        raise HsError(
            "the data set {} has no rows".format(path),
            UNTOUCHED,
            "point hs_dataset at the file or folder that holds the prompts",
        )
    return result


def count(result: Scan, length: int, whole: int, masked: bool, times: int = 1) -> None:
    """Add ``times`` samples of ``length`` tokens, cut from ``whole``."""
    result.samples += times
    result.tokens += times * length
    result.cut += times * (whole > length)
    result.masked += times * masked
    result.min_length = min(result.min_length or length, length)
    result.max_length = max(result.max_length, length)
    edge = 1 << max(length - 1, 0).bit_length()
    result.hist[edge] = result.hist.get(edge, 0) + times


def check(idx: int, where: str, record: Any, limits: Limits) -> Union[Row, BadRow]:
    """One record as a Row, or the first fault that it has."""
    if isinstance(record, BadRow):
        return record
    if not isinstance(record, dict):
        return BadRow(idx, where, "not an object with input_ids but {}".format(_kind(record)))
    if record.get("input_ids") is None:
        return BadRow(idx, where, "no input_ids (it has: {})".format(", ".join(sorted(map(str, record))) or "nothing"))
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(ids, list):
        return BadRow(idx, where, "input_ids is not a list but {}".format(_kind(ids)))
    if not ids:
        return BadRow(idx, where, "input_ids is empty")
    fault = _foreign(ids)
    if fault is not None:
        return BadRow(idx, where, "input_ids[{}] is not an integer but {}".format(fault, _kind(ids[fault])))
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        place = next(place for place, token in enumerate(ids) if not 0 <= token < limits.vocab_size)
        return BadRow(
            idx,
            where,
            "input_ids[{}] is {}, outside the vocabulary of {} (another tokenizer?)".format(
                place, ids[place], limits.vocab_size
            ),
        )
    if mask is not None:
        if not isinstance(mask, list):
            return BadRow(idx, where, "loss_mask is not a list but {}".format(_kind(mask)))
        if len(mask) != len(ids):
            return BadRow(idx, where, "loss_mask has {} entries for {} input_ids".format(len(mask), len(ids)))
        if set(map(type, mask)) != {int} or not _BITS.issuperset(mask):
            place = next((place for place, value in enumerate(mask) if value not in (0, 1)), -1)
            if place >= 0:
                return BadRow(idx, where, "loss_mask[{}] is {!r}, neither 0 nor 1".format(place, mask[place]))
            mask = [int(value) for value in mask]  # true, or 1.0
    if record.get("seq_len") not in (None, len(ids)):
        return BadRow(idx, where, "seq_len is {!r} for {} input_ids".format(record["seq_len"], len(ids)))
    if limits.cut_to is not None:
        ids, mask = ids[: limits.cut_to], mask[: limits.cut_to] if mask is not None else None
    if len(ids) > limits.max_prompt:
        return BadRow(
            idx,
            where,
            "{} tokens, the server takes {}: cut the data set (cut_to) or raise the context length".format(
                len(ids), limits.max_prompt
            ),
        )
    return Row(idx, ids, mask)


def _foreign(ids: List[Any]) -> Optional[int]:
    """Index of the first entry that is no integer, None where all are (bool is an int to Python, not to us)."""
    if set(map(type, ids)) == {int}:
        return None
    return next(place for place, token in enumerate(ids) if type(token) is not int)


def _kind(value: Any) -> str:
    text = repr(value)
    return "{} {}".format(type(value).__name__, text if len(text) <= 30 else text[:27] + "...")


def digest(path: Union[str, Path]) -> str:
    """sha256 over the data set's files: one file's bytes, or names and bytes of a folder's data files."""
    total = hashlib.sha256()
    files = _files(Path(path))
    for file in files:
        if len(files) > 1 or file != Path(path):
            total.update(file.name.encode() + b"\0")
        with file.open("rb") as handle:
            for block in iter(lambda: handle.read(1 << 20), b""):
                total.update(block)
    return total.hexdigest()


def _files(path: Path) -> List[Path]:
    """The files that hold the rows, in order."""
    if not path.exists():
        raise HsError(
            "there is no data set at {}".format(path),
            UNTOUCHED,
            "set hs_dataset to a .jsonl or .parquet file, or an arrow data set folder, on the target",
        )
    if path.is_file():
        return [path]
    state = path / "state.json"
    if state.is_file():
        try:
            names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise HsError(
                "{} does not name its data files ({!r})".format(state, error),
                UNTOUCHED,
                "save the data set anew with datasets' save_to_disk",
            ) from error
        files = [path / name for name in names]
    elif (path / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
        raise HsError(
            "{} holds several splits".format(path), UNTOUCHED, "set hs_dataset to one of them: {}".format(splits)
        )
    else:
        files = sorted(path.glob("*.parquet"))
    missing = [file for file in files if not file.is_file()]
    if not files or missing:
        what = (
            "{} lacks {}".format(path, missing[0].name)
            if missing
            else "{} is a folder without state.json (arrow) or *.parquet files".format(path)
        )
        raise HsError(
            what,
            UNTOUCHED,
            "set hs_dataset to a .jsonl or .parquet file, or a folder that datasets' save_to_disk wrote",
        )
    return files


@dataclass(frozen=True)
class _Source:
    """What is done with a row as it was read.

    parse: makes a record of it; a ValueError is the row's fault. brief: (tokens before the cut, whether it has a loss mask) of a row in
    which :func:`check` would find no fault, None wherever that takes the record to tell.
    """

    parse: Callable[[Any], Any]
    brief: Callable[[Any, Limits], Optional[Tuple[int, bool]]]


# (word between file and number in messages, number, row as it was read, what to do with it)
_Rows = Iterator[Tuple[str, int, Any, _Source]]


def _records(path: Path, wanted: Optional[Callable[[int], bool]] = None) -> Iterator[Tuple[int, str, Any]]:
    """(row number, where it is, raw record) of every wanted row; the record is a BadRow where it cannot even be parsed."""
    for idx, (file, word, number, raw, source) in enumerate(_raw_rows(path)):
        if wanted is None or wanted(idx):
            where = "{}{}{}".format(file.name, word, number)
            yield idx, where, _record(idx, where, raw, source)


def _record(idx: int, where: str, raw: Any, source: _Source) -> Any:
    """The record that a row holds, a BadRow where it holds none."""
    try:
        return source.parse(raw)
    except UnicodeDecodeError:
        return BadRow(idx, where, "not JSON (not UTF-8 text)")
    except ValueError as error:
        return BadRow(idx, where, "not JSON ({})".format(error))


def _raw_rows(path: Path) -> Iterator[Tuple[Path, str, int, Any, _Source]]:
    """Every row of every file, unparsed."""
    for file in _files(path):
        if file.suffix == ".parquet":
            rows_of: Callable[[Path], _Rows] = _parquet
        else:
            rows_of = _arrow if file.suffix == ".arrow" else _json_lines
        for word, number, raw, source in rows_of(file):
            yield file, word, number, raw, source


def _json_lines(file: Path) -> _Rows:
    """One JSON value a line; empty lines are no rows (but count as lines in messages)."""
    source = _Source(_parse, _brief)
    with file.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if line.strip():
                yield ":", number, line, source


def _brief(line: bytes, limits: Limits) -> Optional[Tuple[int, bool]]:
    """One pass over the text that checks while it parses: msgspec takes no float or true for an int, and stops at the first that is out of range."""
    decode = _decoder(limits.vocab_size)
    if decode is None:
        return None
    try:
        if not line.isascii():
            line.decode()  # what is passed over is not looked at
        ids, mask, length = decode(line)
    except Exception:  # whatever it is, the record tells it
        return None
    return _plain(len(ids), None if mask is None else len(mask), length, limits)


@functools.lru_cache(maxsize=4)
def _decoder(vocab_size: int) -> Optional[Callable[[bytes], Tuple[List[int], Optional[List[int]], Optional[int]]]]:
    """What reads the columns of a line whose ids lie in the vocabulary and whose mask is 0 and 1; None without msgspec."""
    if _msgspec is None or sys.version_info < (3, 9):
        return None
    from typing import Annotated

    def within(end: int) -> Any:
        return List[Annotated[int, _msgspec.Meta(ge=0, lt=end)]]

    fields = [
        ("input_ids", within(vocab_size)),
        ("loss_mask", Optional[within(2)], None),
        ("seq_len", Optional[int], None),
    ]
    decoder = _msgspec.json.Decoder(_msgspec.defstruct("Line", fields, gc=False))

    def decode(line: bytes) -> Tuple[List[int], Optional[List[int]], Optional[int]]:
        row = decoder.decode(line)
        return row.input_ids, row.loss_mask, row.seq_len

    return decode


def _plain(tokens: int, masked: Optional[int], length: Any, limits: Limits) -> Optional[Tuple[int, bool]]:
    """A brief of a row of good ids and mask, None where a length is the matter. masked: entries of the mask. length: what seq_len says."""
    left = min(tokens, tokens if limits.cut_to is None else limits.cut_to)
    if not 0 < left <= limits.max_prompt or masked not in (None, tokens) or length not in (None, tokens):
        return None
    return tokens, masked is not None


def _parse(line: bytes) -> Any:
    """The JSON value in ``line``."""
    if _orjson is not None:
        try:
            return _orjson.loads(line)
        except ValueError:
            pass  # what it takes for no JSON (NaN, long integers) is judged, and told, by the standard library
    return json.loads(line)


def _parquet(file: Path) -> _Rows:
    parquet = _pyarrow("parquet", file)
    try:
        with parquet.ParquetFile(str(file)) as source:
            wanted = [name for name in COLUMNS if name in source.schema_arrow.names]
            yield from _batches(source.iter_batches(batch_size=256, columns=wanted))
    except _arrow_errors() as error:
        raise HsError(
            "{} is not readable as Parquet: {}".format(file, error), UNTOUCHED, "write the file anew"
        ) from error


def _arrow(file: Path) -> _Rows:
    ipc = _pyarrow("ipc", file)
    try:
        with ipc.open_stream(str(file)) as source:
            yield from _batches(source)
    except _arrow_errors() as error:
        raise HsError(
            "{} is not readable as an arrow stream: {}".format(file, error),
            UNTOUCHED,
            "save the data set anew with datasets' save_to_disk",
        ) from error


def _batches(batches: Any) -> _Rows:
    number = 0
    for batch in batches:
        names = [name for name in COLUMNS if name in batch.schema.names]
        columns = {name: batch.column(batch.schema.get_field_index(name)) for name in names}

        # one row at a time: a batch of long rows as Python ints would be many times its arrow size
        def record(place: int, columns: Dict[str, Any] = columns) -> Dict[str, Any]:
            values = ((name, _flat(column[place].as_py())) for name, column in columns.items())
            return {name: value for name, value in values if value is not None}

        def brief(place: int, limits: Limits, columns: Dict[str, Any] = columns) -> Optional[Tuple[int, bool]]:
            return _brief_columns({name: column[place] for name, column in columns.items()}, limits)

        source = _Source(record, brief)
        for place in range(batch.num_rows):
            yield " row ", number, place, source
            number += 1


def _brief_columns(row: Dict[str, Any], limits: Limits) -> Optional[Tuple[int, bool]]:
    """The brief of a row of arrow scalars; its numbers are never made Python's."""
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    tokens = _within(ids, limits.vocab_size)
    masked = None if mask is None or not mask.is_valid else _within(mask, 2)
    if tokens is None or (masked is None and mask is not None and mask.is_valid):
        return None
    length = row["seq_len"].as_py() if "seq_len" in row else None
    return None if isinstance(length, list) else _plain(tokens, masked, length, limits)


def _within(scalar: Any, end: int) -> Optional[int]:
    """How many numbers a list has, None unless all of them are there, whole and from 0 to below ``end``."""
    import pyarrow
    import pyarrow.compute

    values = getattr(scalar, "values", None)
    if not isinstance(values, pyarrow.Array) or values.null_count or not len(values):
        return None
    if not pyarrow.types.is_integer(values.type):
        return None
    found = pyarrow.compute.min_max(values)
    return len(values) if found["min"].as_py() >= 0 and found["max"].as_py() < end else None


def _flat(value: Any) -> Any:
    """A tensor of shape [1, T], as some tools save their rows, is a list in a list: the row itself. Anything else stays."""
    return value[0] if isinstance(value, list) and len(value) == 1 and isinstance(value[0], list) else value


def _pyarrow(part: str, file: Path) -> Any:
    """A module of pyarrow, or one clear message: it is no part of SGLang's own requirements."""
    try:
        import importlib

        return importlib.import_module("pyarrow." + part)
    except ImportError as error:
        raise HsError(
            "{} needs pyarrow, which {} cannot import".format(os.path.basename(str(file)), sys.executable),
            UNTOUCHED,
            "install pyarrow (or datasets) beside SGLang, or give the data set as JSON lines",
        ) from error


def _arrow_errors() -> Tuple[Type[BaseException], ...]:
    import importlib

    return (importlib.import_module("pyarrow").ArrowException, OSError)
