"""Trainers read archives of samples in place (docs/formats.md): nothing is unpacked, a sample is a slice of a mapped file.

Put this folder on PYTHONPATH beside the trainer. Needs torch, safetensors and, for the loss masks, pyarrow.

    Archives(folder)[5]                      the tensors of row 5, as its own file would hold them
    speculators(folder)                      speculators' transfer: ArrowDataset(..., transfer=speculators(folder))
    specforge()                              from then on SpecForge reads a folder of archives as a folder of its own files

``folder`` is what moving left at the remote, on a mount or copied back: archives.json, archives/, samples.jsonl, the arrow data set.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
from safetensors import safe_open

INDEX = "archives.json"
ARROW = "data-00000-of-00001.arrow"
PLACE = re.compile(r"(?P<folder>.*)/archives\.json#data_(?P<idx>\d+)\.ckpt")  # how SpecForge is told of a sample


class Archives(Mapping[int, Dict[str, torch.Tensor]]):
    """The samples of ``folder`` by their row in the data set: token_ids int64 [T], hidden_states [T, n + 1, H], final_post_norm [T, H] where
    it was captured. Tensors are views of mapped files: what is not touched is not read. Cheap to pickle; each process maps for itself.

    FileNotFoundError where the folder holds no archives.
    """

    def __init__(self, folder: "str | os.PathLike[str]") -> None:
        self.folder = Path(folder)
        document = json.loads((self.folder / INDEX).read_text(encoding="utf-8"))
        if document["format"] != 1:
            raise ValueError(f"{self.folder / INDEX} has format {document['format']}, this reader knows 1")
        self._where: Dict[int, str] = {idx: one["file"] for one in document["archives"] for idx in one["samples"]}
        # what moved before there were archives has a file of its own
        self._single = frozenset(document.get("single") or ())
        self._where.update((idx, f"hidden_states/hs_{idx}.safetensors") for idx in self._single)
        self._open: Dict[str, Any] = {}
        self._process = os.getpid()

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._where))

    def __getitem__(self, idx: int) -> Dict[str, torch.Tensor]:
        where = self._where[idx]
        prefix = "" if idx in self._single else f"{idx}."
        file, there = self._handle(where), self._names(where)
        names = ("token_ids", "hidden_states", "final_post_norm")
        found = {name: file.get_tensor(prefix + name) for name in names if prefix + name in there}
        if idx in self._single:  # many of them: none stays open
            del self._open[where]
        return found

    def _handle(self, name: str) -> Any:
        if self._process != os.getpid():  # a worker that was forked
            self._open, self._process = {}, os.getpid()
        if name not in self._open:
            handle = safe_open(str(self.folder / name), framework="pt")
            self._open[name] = (handle, frozenset(handle.keys()))
        return self._open[name][0]

    def _names(self, name: str) -> "frozenset[str]":
        self._handle(name)
        names: "frozenset[str]" = self._open[name][1]
        return names


class LossMasks:
    """The loss mask of each row, int64 [T], out of the arrow data set beside the archives, mapped too."""

    def __init__(self, folder: "str | os.PathLike[str]") -> None:
        import pyarrow

        with pyarrow.memory_map(str(Path(folder) / ARROW)) as source:
            self._column = pyarrow.ipc.open_stream(source).read_all()["loss_mask"]

    def __getitem__(self, idx: int) -> torch.Tensor:
        return torch.tensor(self._column[idx].as_py(), dtype=torch.int64)


# -- speculators 0.9 -----------------------------------------------------------------------------------------------------


def speculators(folder: "str | os.PathLike[str]") -> Any:
    """A transfer for speculators' ArrowDataset (and its build of data loaders): cached states come out of the archives in ``folder``."""
    from hs_connectors import HiddenStatesTransfer

    return _transfer(HiddenStatesTransfer)(folder)


@functools.lru_cache(maxsize=None)
def _transfer(base: Any) -> Any:
    class ArchiveTransfer(base):  # type: ignore[misc]
        """Hands out what is in the archives; generates nothing."""

        def __init__(self, folder: "str | os.PathLike[str]") -> None:
            self.archives = Archives(folder)

        def __reduce__(self) -> Any:
            return speculators, (self.archives.folder,)

        def get_cached(self, file_idx: int) -> Optional[Dict[str, torch.Tensor]]:
            """The states of a row, None where it has none (in quarantine)."""
            return self.archives.get(file_idx)

        def get_generated(self, params: Dict[str, Any]) -> Optional[Dict[str, torch.Tensor]]:
            """Archives are only read."""
            raise RuntimeError(
                "archives hold what was extracted and generate nothing: set on_missing to skip, warn or raise"
            )

    return ArchiveTransfer


# -- SpecForge 0.2 -------------------------------------------------------------------------------------------------------


def specforge() -> None:
    """Have SpecForge's own readers take a folder with archives.json as a folder of their files; all other folders as ever.

    A sample's name is then FOLDER/archives.json#data_ROW.ckpt. Call it before training begins, in every process.
    """
    import specforge.runtime.data_plane.feature_store as store
    import specforge.runtime.data_plane.offline_reader as reader

    if getattr(store.load_feature_file, "_reads_archives", False):
        return
    load, listing = store.load_feature_file, reader.list_feature_files

    @functools.wraps(load)
    def load_feature_file(path: str) -> Dict[str, torch.Tensor]:
        found = PLACE.fullmatch(path)
        return _feature(found.group("folder"), int(found.group("idx"))) if found else load(path)

    @functools.wraps(listing)
    def list_feature_files(path: str) -> List[str]:
        if not os.path.isfile(os.path.join(path, INDEX)):
            files: List[str] = listing(path)
            return files
        folder = os.path.abspath(path)
        return [f"{folder}/{INDEX}#data_{idx}.ckpt" for idx in _archives(folder)]

    load_feature_file._reads_archives = True  # type: ignore[attr-defined]
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "specforge"]:
        for name, old, new in (
            ("load_feature_file", load, load_feature_file),
            ("list_feature_files", listing, list_feature_files),
        ):
            if vars(module).get(name) is old:
                setattr(module, name, new)


@functools.lru_cache(maxsize=8)
def _archives(folder: str) -> Archives:
    return Archives(folder)


@functools.lru_cache(maxsize=8)
def _masks(folder: str) -> LossMasks:
    return LossMasks(folder)


def _feature(folder: str, idx: int) -> Dict[str, torch.Tensor]:
    """A sample as SpecForge's files hold it: the boundaries side by side, the post-norm final state."""
    sample = _archives(folder)[idx]
    if "final_post_norm" not in sample:
        post = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))["final"] == "post_norm"
        if not post:
            raise KeyError(
                f"{folder} was captured without the post-norm final state, which SpecForge reads (hs_final: both)"
            )
    states = sample["hidden_states"]
    final = sample["final_post_norm"] if "final_post_norm" in sample else states[:, -1]
    return {
        "input_ids": sample["token_ids"],
        "loss_mask": _masks(folder)[idx],
        "hidden_state": final.unsqueeze(0),
        "aux_hidden_state": states[:, :-1].flatten(1).unsqueeze(0),
    }
