"""``export``: a finished output folder in another trainer's format. Needs no GPU and no server.

One sample in memory at a time; each file is whole or absent; started again it verifies what is there and goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
from sglang_hs import formats
from sglang_hs.errors import HsError
from sglang_hs.fsio import read_json, sync_folder, write_json
from sglang_hs.manifest import Sample
from sglang_hs.plan import size as told_size

from . import arrowset
from .captured import Source
from .dumpfile import file_sha256
from .exchange import lock
from .layouts import LAYOUTS, Layout
from .ledger import Entry, Ledger

OVERHEAD = 8192  # bytes that torch.save adds to a file's tensors at most (a test holds it to that)
EVERY = 5.0  # seconds between two lines of progress


class _Hashing:
    """A file that is hashed and counted while it is written, front to back."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.sha256 = hashlib.sha256()
        self.count = 0

    def write(self, data: Any) -> int:
        """Write and hash."""
        written = int(self._handle.write(data))
        self.sha256.update(data)
        self.count += written
        return written

    def flush(self) -> None:
        """As files have it."""
        self._handle.flush()


def choose_final(source: Source, name: str, wish: Optional[str]) -> str:
    """Which final state goes into the files; HsError where it was not captured or the format does not read it."""
    reads, kept = formats.READS[name], formats.kept(source.final)
    wanted = wish or next((final for final in reads if final in kept), reads[0])
    if wanted not in reads:
        raise HsError(
            "{} reads the {} final state, not the {} one".format(name, " or ".join(reads), wanted),
            "everything",
            "leave --final out",
        )
    if wanted not in kept:
        raise HsError(
            "{} needs the {} final state, and {} was captured with hs_final={}".format(
                name, wanted, source.folder, source.final
            ),
            "everything",
            "extract again into another hs_output_dir, with {} in hs_formats (or hs_final=both)".format(name),
        )
    return wanted


class Export:
    """One export of ``source`` into ``folder``. ``run`` does it and returns the numbers."""

    def __init__(self, source: Source, layout: Layout, folder: Path, final: str) -> None:
        self.source = source
        self.layout = layout
        self.folder = folder
        self.final = final
        self.numbers = {"written": 0, "bytes": 0, "verified": 0, "mended": 0, "described": 0}
        self._lock = -1
        self._said = time.monotonic()
        self._began = time.monotonic()

    @property
    def sample_bytes(self) -> int:
        """Bytes of one token in the exported file: each state, its id and its mask."""
        return (self.source.boundaries + 1) * self.source.hidden_size * self.source.itemsize + 16

    def run(self, dry: bool = False) -> Dict[str, Any]:
        """Export what is not there yet. ``dry``: only look which files are missing (by name and size)."""
        claim = {"from": self.source.identity, "format": self.layout.name, "final": self.final}
        if self.folder.resolve() == self.source.folder.resolve():
            raise HsError("--to is the captured folder itself", "everything", "export into a folder of its own")
        if not dry:
            self._open()
        ledger = Ledger(self.folder, claim, read_only=dry)
        try:
            todo = self._room(ledger)
            if dry:
                return self._result(todo)
            lengths: Dict[str, int] = {}
            for sample, record in self.source.rows():
                path = self.layout.path(sample.idx)
                if not self._verified(ledger, path, sample):
                    self._write(ledger, path, sample, record)
                lengths[str(sample.idx)] = sample.length
                self._tell()
            self._describe(lengths)
        finally:
            ledger.close()
            if self._lock >= 0:
                os.close(self._lock)
        return self._result(self.numbers["written"])

    def _result(self, written: int) -> Dict[str, Any]:
        done = self.source.counts["done"]
        result = dict(self.numbers, format=self.layout.name, final=self.final, to=str(self.folder), samples=done)
        return dict(result, written=written, left_out=self.source.left_out)

    def _open(self) -> None:
        """Make and lock the folder; clear away what a killed export left half-written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock(self.folder / ".lock", "the export folder {}".format(self.folder))
            for part in self.folder.glob("**/.*.part"):
                part.unlink()
        except OSError as error:
            raise self._fault(error) from error

    def _room(self, ledger: Ledger) -> int:
        """How many files are to be written; HsError where there is no room for them."""
        count, need = 0, 0
        for sample in self.source.book.samples("done"):
            path = self.layout.path(sample.idx)
            if self._there(ledger, path, sample) is None:
                count += 1
                need += sample.length * self.sample_bytes + OVERHEAD
        place = self.folder
        while not place.exists():
            place = place.parent
        info = os.statvfs(str(place))
        free = (info.f_bfree if os.geteuid() == 0 else info.f_bavail) * info.f_frsize
        if need > free:
            raise HsError(
                "the export needs {} in {}, which has {} free".format(told_size(need), self.folder, told_size(free)),
                "what was exported before",
                "make room, or export into a folder of a larger file system",
            )
        return count

    def _there(self, ledger: Ledger, path: str, sample: Sample) -> Optional[Entry]:
        """The book's entry of a file that is there in its size and was made of this sample."""
        entry = ledger.entry(path)
        with contextlib.suppress(OSError):
            if entry and entry.source == sample.sha256 and (self.folder / path).stat().st_size == entry.bytes:
                return entry
        return None

    def _verified(self, ledger: Ledger, path: str, sample: Sample) -> bool:
        """Whether the file is there, byte for byte as it was written."""
        entry = self._there(ledger, path, sample)
        if entry is None:
            return False
        whole = file_sha256(self.folder / path) == entry.sha256
        self.numbers["verified" if whole else "mended"] += 1
        return whole

    def _write(self, ledger: Ledger, path: str, sample: Sample, record: Dict[str, Any]) -> None:
        """Read the sample, save it beside its place, fsync, rename, enter."""
        what = self.layout.build(self.source.read(sample, record), self.final)
        place = self.folder / path
        part = place.with_name(".{}.part".format(place.name))
        try:
            place.parent.mkdir(exist_ok=True)
            try:
                with part.open("wb") as handle:
                    hashing = _Hashing(handle)
                    torch.save(what, hashing)
                    handle.flush()
                    os.fsync(handle.fileno())
                os.replace(str(part), str(place))
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink()
                raise
            sync_folder(place.parent)
        except (OSError, RuntimeError) as error:
            raise self._fault(error) from error  # torch turns a full disk into a RuntimeError
        assert sample.sha256 is not None
        ledger.enter(path, Entry(sample.sha256, hashing.count, hashing.sha256.hexdigest()))
        self.numbers["written"] += 1
        self.numbers["bytes"] += hashing.count

    def _fault(self, error: Exception) -> HsError:
        return HsError(
            "the export folder {} takes no more: {}".format(self.folder, error),
            "the files that are there; each is whole",
            "make room, or mend the owner or file system, and export again: it goes on where it stopped",
        )

    def _tell(self) -> None:
        """A line of progress now and then."""
        now = time.monotonic()
        if now - self._said >= EVERY:
            self._said = now
            seen = self.numbers["written"] + self.numbers["verified"]
            rate = seen / (now - self._began)
            print(
                "{}: {}/{} samples, {:.1f} MB/s written, {:.0f} s left".format(
                    self.layout.name,
                    seen,
                    self.source.counts["done"],
                    self.numbers["bytes"] / (now - self._began) / 1e6,
                    (self.source.counts["done"] - seen) / rate if rate else 0,
                ),
                flush=True,
            )

    def _describe(self, lengths: Dict[str, int]) -> None:
        """export.json for whoever finds the folder; for speculators also the two files that it knows."""
        source, taken = self.source, self.source.document
        about = {
            "format": self.layout.name,
            "final": self.final,
            "hidden_states_prenorm": self.final == formats.PRE,
            "dtype": source.dtype,
            "hidden_size": source.hidden_size,
            "boundaries": [slot for slot in taken["slots"] if "boundary" in slot],
            "samples": len(lengths),
            "tokens": sum(lengths.values()),
            "left_out": source.left_out,
            "shifted": False,
            "checksums": "export.sqlite, table files",
            "captured": {key: taken.get(key) for key in ("engine", "dataset", "model", "run_id")},
        }
        documents: List[Tuple[str, Dict[str, Any]]] = [("export.json", about)]
        if self.layout.name == "speculators-pt":
            documents += [("sample_lengths.json", dict(lengths)), ("data_config.json", self._data_config(lengths))]
        for name, document in documents:
            with contextlib.suppress(HsError):  # a broken one is written anew
                if read_json(self.folder / name) == document:
                    continue
            try:
                write_json(self.folder / name, document, 0o644)
            except OSError as error:
                raise self._fault(error) from error
            self.numbers["described"] += 1

    def _data_config(self, lengths: Dict[str, int]) -> Dict[str, Any]:
        """speculators' data_config.json (its DataGenerationConfig 2.0); what only its own generator has is left out."""
        source, taken = self.source, self.source.document
        states = source.boundaries + 1
        kind = "torch.{}".format(source.dtype)
        # its layer ids are outputs of layers, the last one the final state
        layers = [slot["output_of_layer"] for slot in taken["slots"] if "boundary" in slot]
        return {
            "version": "2.0",
            "generated_at": taken["written"],
            "model": {"target_model_path": taken["model"]["path"], "hidden_size": source.hidden_size},
            "data": {
                "train_data_path": taken["dataset"]["path"],
                "seq_length": max(lengths.values()),
                "max_samples": None,
                "num_samples": len(lengths),
            },
            "hidden_states": {
                "layer_ids": [*layers, taken["num_layers"] - 1],
                "description": "Boundaries in order, then the {} final state".format(self.final.replace("_", "-")),
            },
            "format": {
                "file_pattern": "data_{idx}.pt",
                "schema": {
                    "input_ids": {"dtype": "torch.long", "shape": "[seq_len]"},
                    "hidden_states": {
                        "dtype": "list[{}]".format(kind),
                        "shape": "list of [seq_len, {}]".format(source.hidden_size),
                        "num_tensors": states,
                    },
                    "loss_mask": {"dtype": "torch.long", "shape": "[seq_len]"},
                },
            },
        }


def native(source: Source, dry: bool = False) -> Dict[str, Any]:
    """The arrow data set beside hidden_states/, where the extraction could not write it."""
    rows = source.counts["total"]
    result = {"format": "native", "final": source.final, "to": str(source.folder), "samples": source.counts["done"]}
    result.update(written=0, verified=0, mended=0, described=0, bytes=0, left_out=source.left_out)
    choose_final(source, "native", None)
    if arrowset.whole(source.folder, rows):
        return dict(result, verified=1)
    if dry:
        return dict(result, written=1)
    reason = arrowset.missing()
    if reason is not None:
        raise HsError(
            "the arrow data set cannot be written: {}".format(reason), "everything", arrowset.next_step(source.folder)
        )
    arrow = arrowset.ArrowSet(source.folder)
    try:
        for sample, record in source.rows():
            arrow.add(sample.idx, record["input_ids"], record["loss_mask"])
        arrow.finish(rows)
    except OSError as error:
        raise HsError(
            "{} takes no more: {}".format(source.folder, error), "the captured samples", "make room and try again"
        ) from error
    finally:
        arrow.close()
    return dict(result, written=1)


def export(output: Path, name: str, to: Optional[Path], final: Optional[str], dry: bool = False) -> Dict[str, Any]:
    """Export the folder ``output`` as ``name`` into ``to``. Returns {written, verified, mended, left_out, ...}: files, not samples."""
    source = Source(output)
    try:
        if name == "native":
            return native(source, dry)
        if to is None:
            raise HsError("{} needs a folder to be written to".format(name), "everything", "give it with --to")
        return Export(source, LAYOUTS[name], to, choose_final(source, name, final)).run(dry)
    finally:
        source.close()


def told(result: Dict[str, Any], dry: bool) -> str:
    """The result as one line."""
    line = "{format}: {samples} samples in {to} ({final}), {written} {new}, {verified} verified".format(
        new="files to write" if dry else "files written", **result
    )
    if result["mended"]:
        line += ", {} of them damaged before".format(result["mended"])
    if result["left_out"]:
        line += "; {} rows of the data set are in quarantine and were left out".format(result["left_out"])
    return line
