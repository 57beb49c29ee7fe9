"""The output folder: files in their final place, or not there at all.

hidden_states/hs_{idx}.safetensors   one per row of the data set (equal sequences share one file's bytes by hard link)
archives/, archives.json             where samples move on in archives: the one being made; which sample is in which
quarantine/hs_{idx}.json             why a sample is not there; beside it the dump that was refused, if there was one
manifest.sqlite, manifest.json       the book, and what describes the folder to whoever finds it
samples.jsonl                        once complete: token ids and loss mask of each sample that is there
data-*.arrow, dataset_info.json, state.json   once complete, where pyarrow is: the same as an arrow data set, see arrowset.py
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

try:
    import orjson as _orjson
except ImportError:
    _orjson = None

from sglang_hs.fsio import sync_folder, write_json

from .dumpfile import Expected, Header, check_data, check_header, same_bytes
from .exchange import lock, remove
from .faults import OutputFault, SampleFault

STATES = "hidden_states"
UNFINISHED = (
    ".hs_",
    ".manifest.json.",
    ".archives.json.",
    ".samples.jsonl.",
    ".data-",
    ".dataset_info.json.",
    ".state.json.",
)


def file_name(idx: int) -> str:
    """The sample's file, relative to the output folder."""
    return "{}/hs_{}.safetensors".format(STATES, idx)


class Output:
    """The folder, locked for this client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = -1

    def open(self) -> None:
        """Make the folder's parts, lock it, and clear away what a killed client left half-written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / STATES).mkdir(exist_ok=True)
            (self.folder / "quarantine").mkdir(exist_ok=True)
        except OSError as error:
            raise OutputFault(
                "the output folder {} cannot be made: {}".format(self.folder, error),
                "everything",
                "choose a folder that this user can write",
            ) from error
        self._lock = lock(self.folder / ".lock", "the output folder {}".format(self.folder))
        # names that begin with a dot are on their way to another one; this folder's own lock is not
        for folder in (self.folder, self.folder / STATES, self.folder / "quarantine"):
            with os.scandir(str(folder)) as entries:
                for entry in entries:
                    if entry.name.startswith(UNFINISHED):
                        os.unlink(entry.path)

    def close(self) -> None:
        """Unlock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def accept(self, dump: Path, idx: int, ids: List[int], name: str, expected: Expected) -> Tuple[str, Header, str]:
        """Verify ``dump`` and move it to its final place, durable before it is seen. Returns (file, its header, sha256)."""
        final = self.folder / file_name(idx)
        part = final.with_name(".{}.part".format(final.name))
        try:
            moved = os.stat(str(dump)).st_dev == os.stat(str(final.parent)).st_dev
            # taken first, checked then: what is looked at is the very file that stays, whatever a late forward of a prompt that was asked
            # again puts in the dump's place, and whatever the copy did to it
            if moved:
                os.replace(str(dump), str(part))
            try:
                if not moved:
                    _copy(dump, part)
                header = check_header(part, len(ids), name, expected)
                total = check_data(part, header, ids)
                _sync_file(part)
                os.replace(str(part), str(final))
            except SampleFault as error:
                if not moved and not same_bytes(dump, part):
                    raise SampleFault(
                        "the copy of the dump in {} differs from the dump ({}): a failing disk?".format(
                            self.folder, error
                        )
                    ) from error
                raise
            finally:
                if moved:
                    with contextlib.suppress(OSError):
                        os.replace(str(part), str(dump))  # for the quarantine
                else:
                    remove(part)
            sync_folder(final.parent)
        except OSError as error:
            raise self.fault(error) from error
        self.release(idx)
        return file_name(idx), header, total

    def release(self, idx: int) -> None:
        """The sample is there now: what an earlier attempt left in quarantine is of no use any more."""
        for suffix in ("json", "safetensors"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink("{}/quarantine/hs_{}.{}".format(self.folder, idx, suffix))

    def share(self, source: str, idx: int) -> str:
        """Give sample ``idx`` the bytes of the finished file ``source`` (relative): a hard link, or a copy where there are none."""
        final = self.folder / file_name(idx)
        part = final.with_name(".{}.part".format(final.name))
        try:
            remove(part)
            try:
                os.link(str(self.folder / source), str(part))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise
                shutil.copyfile(str(self.folder / source), str(part))
                _sync_file(part)
            # two names of one file: rename would do nothing and leave the part
            remove(final)
            os.replace(str(part), str(final))
            sync_folder(final.parent)
        except OSError as error:
            raise self.fault(error) from error
        self.release(idx)
        return file_name(idx)

    def quarantine(self, idx: int, reason: str, facts: Dict[str, Any], dump: Optional[Path] = None) -> None:
        """Keep the reason, and the refused dump if there is one, so that somebody can look at it."""
        folder = self.folder / "quarantine"
        try:
            if dump is not None and dump.is_file():
                shutil.move(str(dump), str(folder / "hs_{}.safetensors".format(idx)))
            write_json(folder / "hs_{}.json".format(idx), dict(facts, idx=idx, reason=reason, time=time.time()), 0o644)
        except OSError as error:
            raise self.fault(error) from error

    def fault(self, error: OSError) -> OutputFault:
        """What an error of the file system means to the run."""
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = (
            "the output folder {} is full".format(self.folder)
            if full
            else "the output folder {} takes no more: {}".format(self.folder, error)
        )
        return OutputFault(
            what,
            "the samples that are done; each is whole",
            "make room (or mend the file system) and run again: it goes on where it stopped",
        )


def book_fault(error: sqlite3.Error, folder: Path) -> OutputFault:
    """What an error of the book's database means to the run."""
    full = "full" in str(error)
    return OutputFault(
        "the output folder {} is full: its book takes no more".format(folder)
        if full
        else "the book in the output folder {} takes no more: {}".format(folder, error),
        "the samples that are done; each is whole",
        "make room (or mend the file system) and run again: it goes on where it stopped",
    )


def _copy(path: Path, to: Path) -> None:
    """A copy inside the kernel; a checksum of what arrived is the caller's."""
    os.close(os.open(str(to), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644))
    shutil.copyfile(str(path), str(to))


def _sync_file(path: Path) -> None:
    fd = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_samples(path: Path, lines: Any) -> int:
    """Write JSON lines whole: to a temporary name, fsynced, renamed. Returns their number."""
    part = path.with_name("." + path.name + ".part")
    count = 0
    with part.open("wb") as handle:
        for line in lines:
            handle.write(_text(line) + b"\n")
            count += 1
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(str(part), str(path))
    sync_folder(path.parent)
    return count


def _text(line: Dict[str, Any]) -> bytes:
    """JSON in ASCII without a blank. Production waits for these lines, so by orjson where it is, as it is beside every SGLang."""
    return _orjson.dumps(line) if _orjson is not None else json.dumps(line, separators=(",", ":")).encode()
