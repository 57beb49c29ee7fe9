"""The folder through which client and engine talk: wishes in, dumps or reasons out. Content-addressed, so nobody counts or races.

attached/rank{r}.json           the capture of this rank is in place (or attached/refused-rank{r}.json with the reason)
want/<name>                     the client's wish; content "" or "ranks" (then every rank writes)
every_rank                      lies here while "ranks" wishes may exist; without it ranks other than 0 look at nothing
done/<name>.safetensors         the dump (rank 0); done/<name>.rank{r}.safetensors for a "ranks" wish
used/<name>.safetensors         a dump that the client has taken: the next one is written over it, if there is one
failed/<name>.json              why there is no dump (failed/<name>.rank{r}.json from ranks other than 0);
                                failed/unnamed.json when the engine's release does not tell whose forward it was
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, Dict, Optional

import torch

from .tensorfile import write_whole

log = logging.getLogger("sglang_hs_capture")

FOLDERS = ("attached", "want", "done", "used", "failed")


def sequence_name(ids: torch.Tensor) -> str:
    """Name of a sequence: sha256 of its token ids ([T], any integer type, host memory) as little-endian int64."""
    return hashlib.sha256(ids.to(torch.int64).contiguous().numpy().astype("<i8", copy=False).tobytes()).hexdigest()


class Exchange:
    """One rank's view of the folder."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder = folder
        self.rank = rank

    def prepare(self) -> None:
        """Make the folders, readable by the engine's user only: hidden states and prompts are nobody else's business."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in FOLDERS:
            (self.folder / name).mkdir(mode=0o700, exist_ok=True)

    def has_wishes(self) -> bool:
        """Whether this rank need look at a forward at all; one or two cheap file system calls."""
        if self.rank != 0 and not (self.folder / "every_rank").exists():
            return False
        try:
            with os.scandir(str(self.folder / "want")) as entries:
                return next(entries, None) is not None
        except OSError:
            return False

    def wish(self, name: str) -> Optional[str]:
        """The content of the wish for ``name``, None where nobody asked for it."""
        try:
            return (self.folder / "want" / name).read_text(encoding="utf-8").strip()
        except OSError:
            return None

    def done_paths(self, name: str, every_rank: bool) -> Dict[str, bool]:
        """File names in done/ that this rank owes for ``name`` -> whether it is the per-rank file."""
        paths = {}
        if every_rank:
            paths["{}.rank{}.safetensors".format(name, self.rank)] = True
        if self.rank == 0:
            paths["{}.safetensors".format(name)] = False
        return paths

    def used(self) -> Optional[Path]:
        """A file to write over, None where there is none. Whoever renames it first has it."""
        try:
            with os.scandir(str(self.folder / "used")) as entries:
                entry = next(entries, None)
                return Path(entry.path) if entry is not None else None
        except OSError:
            return None

    def make_room(self) -> bool:
        """Give the room of all used files back; whether there were any."""
        found = False
        for _ in range(1000):
            path = self.used()
            if path is None:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                found = True
        return found

    def fail(self, name: str, reason: str, no_room: bool = False) -> None:
        """Tell the client why there is no dump; ``no_room``: the folder is full, no sample is to blame.

        Never raises: the server outlives a full disk.
        """
        log.warning("no dump of %s: %s", name, reason)
        suffix = "" if self.rank == 0 else ".rank{}".format(self.rank)
        self._report(self.folder / "failed" / "{}{}.json".format(name, suffix), {"reason": reason, "no_room": no_room})

    def _report(self, path: Path, document: Dict[str, Any]) -> None:
        document = dict(document, rank=self.rank, time=time.time())
        try:
            write_whole(path, [json.dumps(document).encode()])
        except OSError as error:
            log.error("cannot write %s: %s", path, error)

    def attached(self, document: Dict[str, Any]) -> None:
        """Publish that this rank captures, and how."""
        self._drop("refused-rank{}.json".format(self.rank))
        write_whole(
            self.folder / "attached" / "rank{}.json".format(self.rank), [json.dumps(document, indent=1).encode()]
        )

    def refused(self, reason: str) -> None:
        """Publish that this rank does not capture, and why."""
        self._drop("rank{}.json".format(self.rank))
        self._report(self.folder / "attached" / "refused-rank{}.json".format(self.rank), {"reason": reason})

    def _drop(self, name: str) -> None:
        with contextlib.suppress(OSError):
            (self.folder / "attached" / name).unlink()
