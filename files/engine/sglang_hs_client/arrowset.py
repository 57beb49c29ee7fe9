"""The arrow data set beside ``hidden_states/``: OUTPUT itself is then the folder that speculators' ArrowDataset opens.

speculators takes row i of ``datasets.load_from_disk(OUTPUT)`` and the file ``hidden_states/hs_{i}.safetensors``; so the rows are
the data set's rows, none left out. A row without states (in quarantine) is a place-holder: one token, masked out. Its file is
missing, which speculators passes over with ``--on-missing skip`` or ``warn``.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import sys
from array import array
from pathlib import Path
from typing import Any, Dict, List, Optional

from sglang_hs.fsio import sync_folder, write_json

from .dumpfile import file_sha256

DATA = "data-00000-of-00001.arrow"
STATE = "state.json"
BATCH = 1 << 20  # tokens of a record batch: 16 MB in memory
WORD = 8  # bytes of an int64


def missing() -> Optional[str]:
    """Why the data set cannot be written here, None where it can."""
    try:
        import pyarrow  # noqa: F401
    except Exception as error:  # also one that is there and does not fit this numpy
        return "pyarrow cannot be imported by {} ({})".format(sys.executable, error)
    return None


def next_step(output: Path) -> str:
    """What to do once pyarrow is there; nothing needs to be extracted again."""
    return "install pyarrow there, then: python -m sglang_hs_client export --output {} --format native".format(output)


def remove(folder: Path) -> None:
    """Take the data set away: without its state.json nobody opens it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(folder / STATE))


def whole(folder: Path, rows: int) -> bool:
    """Whether the data set is there with this many rows, byte for byte as it was written."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        return bool(state["_hs_rows"] == rows and file_sha256(folder / DATA) == state["_fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


class ArrowSet:
    """Writes the data set, one record batch in memory at a time. Rows come by rising number; gaps become place-holders."""

    def __init__(self, folder: Path) -> None:
        import pyarrow

        self._pa: Any = pyarrow
        self.folder = folder
        self.rows = 0
        words = pyarrow.list_(pyarrow.int64())
        self._schema = pyarrow.schema([("input_ids", words), ("loss_mask", words), ("seq_len", pyarrow.int64())])
        self._part = folder / ".{}.part".format(DATA)
        self._file = self._part.open("wb")
        self._stream = pyarrow.ipc.new_stream(self._file, self._schema)
        self._fresh()

    def _fresh(self) -> None:
        # bytes of int64: packed by struct in a quarter of the time that an array takes to be extended by a list
        self._ids, self._mask, self._lengths = bytearray(), bytearray(), array("q")

    def add(self, idx: int, ids: List[int], mask: List[int]) -> None:
        """Row ``idx``: token ids and loss mask, both of T numbers."""
        if idx < self.rows:
            raise ValueError("row {} after row {}".format(idx, self.rows - 1))
        while self.rows < idx:
            self._append([0], [0])
        self._append(ids, mask)

    def _append(self, ids: List[int], mask: List[int]) -> None:
        self._ids += struct.pack("{}q".format(len(ids)), *ids)
        self._mask += struct.pack("{}q".format(len(mask)), *mask)
        self._lengths.append(len(ids))
        self.rows += 1
        if len(self._ids) >= BATCH * WORD:
            self._flush()

    def _flush(self) -> None:
        """Write what is gathered as one record batch."""
        pa = self._pa
        if not self._lengths:
            return
        offsets = array("i", [0])
        for length in self._lengths:
            offsets.append(offsets[-1] + length)

        def numbers(words: Any, kind: Any) -> Any:
            data = pa.py_buffer(words)
            return pa.Array.from_buffers(kind, data.size // (kind.bit_width // 8), [None, data])

        columns = [
            pa.ListArray.from_arrays(numbers(offsets, pa.int32()), numbers(words, pa.int64()))
            for words in (self._ids, self._mask)
        ]
        columns.append(numbers(self._lengths, pa.int64()))
        self._stream.write_batch(pa.record_batch(columns, schema=self._schema))
        self._fresh()

    def finish(self, rows: int) -> int:
        """Fill up to ``rows`` rows and put the files in place, the one that makes them a data set last. Returns the rows."""
        while self.rows < rows:
            self._append([0], [0])
        self._flush()
        self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        fingerprint = file_sha256(self._part)
        remove(self.folder)  # never an old state.json with new rows
        os.replace(str(self._part), str(self.folder / DATA))
        sync_folder(self.folder)
        told = "Prompts of the hidden states in hidden_states/hs_{i}.safetensors, i = row; see manifest.json"
        # without features `datasets` reads them from the arrow schema, whatever its release calls a list
        write_json(self.folder / "dataset_info.json", {"description": told, "features": None}, 0o644)
        state: Dict[str, Any] = {
            "_data_files": [{"filename": DATA}],
            "_fingerprint": fingerprint,
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": "torch",  # ArrowDataset compares tensors
            "_output_all_columns": False,
            "_split": None,
            "_hs_rows": self.rows,
        }
        write_json(self.folder / STATE, state, 0o644)
        return self.rows

    def close(self) -> None:
        """Leave nothing half-written behind."""
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(str(self._part))
