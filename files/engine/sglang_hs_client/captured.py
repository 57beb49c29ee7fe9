"""A finished output folder as a source: its samples one by one, each checked against the manifest's checksum while it is read."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from sglang_hs import archive, formats
from sglang_hs.errors import HsError
from sglang_hs.fsio import read_json
from sglang_hs.manifest import DONE, FILE, SAMPLES, Manifest, Sample

from .dumpfile import BLOCK, NAMES, TYPES, Expected, check_header
from .faults import SampleFault

UNTOUCHED = "the captured samples: they were only read"


@dataclass(frozen=True)
class Captured:
    """One sample. token_ids, loss_mask: int64 [T]. states: [T, n, H], the boundaries. final: pre_norm/post_norm -> [T, H].

    The tensors may be views of one buffer that holds the whole file.
    """

    idx: int
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: torch.Tensor
    final: Dict[str, torch.Tensor]


class Source:
    """The output folder ``folder``; HsError where it is none, or not complete. ``close`` it.

    dtype: name as in manifest.json. boundaries: how many states before the final one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unpacked: Optional["tempfile.TemporaryDirectory[str]"] = None
        if not (folder / FILE).is_file():
            raise HsError(
                "{} is no output folder: it has no {}".format(folder, FILE),
                "everything",
                "give --output the folder that an extraction wrote (hs_output_dir)",
            )
        try:
            self.book = Manifest(folder, read_only=True)
        except sqlite3.Error as error:
            raise HsError(
                "{} cannot be read: {}".format(folder / FILE, error), UNTOUCHED, "look at that file"
            ) from error
        try:
            self.document = self._complete()
        except BaseException:
            self.close()
            raise
        identity = self.book.identity()
        self.final = str(identity["final"])
        self.dtype = str(identity["dtype"])
        self.boundaries = len(identity["boundaries"])
        self.hidden_size = int(identity["hidden_size"])
        self.identity = identity
        self._expected = Expected(self.boundaries + 1, self.hidden_size, self.dtype, self.final)

    def _complete(self) -> Dict[str, Any]:
        """manifest.json of a folder in which nothing is left to do."""
        self.counts = self.book.counts()
        if not self.book.identity() or self.counts["pending"] or not self.counts["total"]:
            raise HsError(
                "the extraction in {} is not complete: {} of {} samples are not there yet".format(
                    self.folder, self.counts["pending"], self.counts["total"]
                ),
                UNTOUCHED,
                "run extract.yml again, it goes on where it stopped; then export",
            )
        if not self.counts["done"]:
            raise HsError(
                "no sample of {} was extracted: all {} are in quarantine".format(self.folder, self.counts["total"]),
                UNTOUCHED,
                "see the reasons in {}/quarantine".format(self.folder),
            )
        document = read_json(self.folder / "manifest.json")
        for name, there in (("manifest.json", document), (SAMPLES, (self.folder / SAMPLES).is_file())):
            if not there:
                raise HsError(
                    "{} lacks {}, which a complete extraction writes last".format(self.folder, name),
                    UNTOUCHED,
                    "run extract.yml again: it finds the samples in place and writes it",
                )
        return dict(document)

    @property
    def left_out(self) -> int:
        """Rows of the data set that are in quarantine."""
        return self.counts["failed"] + self.counts["bad"]

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return int(torch.empty(0, dtype=TYPES[NAMES[self.dtype]]).element_size())

    def rows(self) -> Iterator[Tuple[Sample, Dict[str, Any]]]:
        """(book's row, line of samples.jsonl with input_ids and loss_mask) of each finished sample, by rising idx."""
        count = 0
        with (self.folder / SAMPLES).open("rb") as handle:
            for number, line in enumerate(handle, 1):
                try:
                    record = json.loads(line)
                    sample: Optional[Sample] = self.book.sample(int(record["idx"]))
                    fits = (
                        sample is not None
                        and sample.state == DONE
                        and sample.length == len(record["input_ids"]) == len(record["loss_mask"])
                    )
                except (ValueError, KeyError, TypeError) as error:
                    raise self._torn(number, "is no sample ({!r})".format(error)) from error
                if sample is None or not fits:
                    raise self._torn(number, "is not what {} says of sample {}".format(FILE, record["idx"]))
                count += 1
                yield sample, record
        if count != self.counts["done"]:
            raise self._torn(count, "is the last, but {} has {} samples".format(FILE, self.counts["done"]))

    def _torn(self, number: int, what: str) -> HsError:
        return HsError(
            "{}: line {} {}".format(self.folder / SAMPLES, number, what),
            UNTOUCHED,
            "remove {} and run extract.yml again: it finds the samples in place and writes it anew".format(SAMPLES),
        )

    def _moved(self, sample: Sample, path: Path) -> Path:
        """The file of a sample that was moved: out of its archive, where that lies here (copied back, or a mount). HsError else."""
        where = self.book.moved_to(sample.idx)
        if where is None:
            return path  # it is simply gone, which is told when it is opened
        if not where.archive or not (self.folder / where.file).is_file():
            raise HsError(
                "sample {} was moved to {} ({})".format(sample.idx, where.root, where.file),
                UNTOUCHED,
                "give the export a folder that has the samples: a mount of {0}, or a copy in a folder of its own (rclone copy {0} FOLDER)".format(
                    where.root
                ),
            )
        if self._unpacked is None:
            self._unpacked = tempfile.TemporaryDirectory(prefix="hs-export-")
        single = Path(self._unpacked.name) / "sample.safetensors"
        try:
            single.write_bytes(archive.unpack(self.folder / where.file, sample.idx))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise HsError(
                "{} is not the archive that was sent: {!r}".format(self.folder / where.file, error),
                UNTOUCHED,
                "copy it from {} again; python -m sglang_hs_client verify --remote tells whether it is right there".format(
                    where.root
                ),
            ) from error
        return single

    def read(self, sample: Sample, record: Dict[str, Any]) -> Captured:
        """The sample's tensors; HsError where its file is not the one that the manifest has the checksum of."""
        assert sample.file is not None and sample.name is not None
        path = self.folder / sample.file
        if not path.exists():
            path = self._moved(sample, path)
        try:
            header = check_header(path, sample.length, sample.name, self._expected)
            data = bytearray(header.size)
            total, place = hashlib.sha256(), 0
            with path.open("rb", buffering=0) as handle, memoryview(data) as view:
                while place < header.size:
                    count = handle.readinto(view[place : place + BLOCK])
                    if not count:
                        raise SampleFault("it ended while it was read")
                    total.update(view[place : place + count])
                    place += count
            if total.hexdigest() != sample.sha256:
                raise SampleFault("its sha256 is not the manifest's")
        except (OSError, SampleFault) as error:
            raise HsError(
                "{} is not what was captured: {}".format(path, error),
                "what was exported before it, and the captured samples",
                "run extract.yml again: a sample that is missing or of another size is made anew, so remove this file first",
            ) from error

        def tensor(name: str) -> torch.Tensor:
            entry = header.tensors[name]
            start, end = entry["data_offsets"]
            kind = torch.int64 if entry["dtype"] == "I64" else TYPES[entry["dtype"]]
            size = torch.empty(0, dtype=kind).element_size()
            flat = torch.frombuffer(data, dtype=kind, count=(end - start) // size, offset=header.start + start)
            return flat.reshape(entry["shape"])

        ids, hidden = tensor("token_ids"), tensor("hidden_states")
        if ids.tolist() != record["input_ids"]:
            raise self._torn(sample.idx, "has other token ids than {}".format(sample.file))
        final = {formats.PRE if self.final == formats.BOTH else self.final: hidden[:, -1]}
        if self.final == formats.BOTH:
            final[formats.POST] = tensor("final_post_norm")
        mask = torch.tensor(record["loss_mask"], dtype=torch.int64)
        return Captured(sample.idx, ids, mask, hidden[:, :-1], final)

    def close(self) -> None:
        """Close the book."""
        if self._unpacked is not None:
            self._unpacked.cleanup()
        self.book.close()
