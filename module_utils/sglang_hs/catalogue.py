"""What hosts have finished of a data set: taken from each host's book, compared, merged into one catalogue on the controller.

A sample that two hosts finished is one sample: the first host by name has it. Hosts whose books belong to different extractions are
never merged: states of two engines, models or boundaries in one data set train to garbage.
"""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from . import packed
from .errors import HsError
from .manifest import FILE, Manifest

# in which hosts of one data set must agree; dtype is known only once an engine was attached
IDENTITY = ("dataset_sha256", "cut_to", "model", "hidden_size", "boundaries", "final", "dtype", "release")
NAMES = {"release": "engine release", "model": "model fingerprint", "dataset_sha256": "data set's sha256"}


def file_name(idx: int) -> str:
    """Where the client puts a sample, relative to its output folder."""
    return "hidden_states/hs_{}.safetensors".format(idx)


@dataclass(frozen=True)
class Catalogue:
    """A host's finished samples, by rising index; tokens and bytes of each. sha256: 32 bytes a sample. files: of those with another name.

    identity: IDENTITY's keys, None where not known yet. share: the open run's, packed; run: its name, empty without one. remotes: how many samples
    moved on to each remote (moving.py); there they are under the same names, or in archives.
    """

    host: str
    identity: Dict[str, Any]
    output: str
    indices: "array[int]"
    lengths: "array[int]"
    sizes: "array[int]"
    sha256: bytes
    files: Dict[int, str] = field(default_factory=dict)
    run: str = ""
    share: str = ""
    remotes: Dict[str, int] = field(default_factory=dict)

    def pack(self) -> str:
        """As one line of text."""
        header = {
            "host": self.host,
            "identity": self.identity,
            "output": self.output,
            "files": {str(idx): name for idx, name in self.files.items()},
            "run": self.run,
            "share": self.share,
            "remotes": self.remotes,
        }
        columns = {
            "indices": packed.column(self.indices),
            "lengths": packed.column(self.lengths),
            "sizes": packed.column(self.sizes),
            "sha256": self.sha256,
        }
        return packed.pack(header, columns)

    @classmethod
    def unpack(cls, text: str, what: str = "a host's catalogue") -> "Catalogue":
        """The opposite. Raises HsError."""
        header, columns = packed.unpack(text, what)
        files = {int(idx): name for idx, name in header.pop("files").items()}
        return cls(
            indices=packed.numbers(columns["indices"], 4),
            lengths=packed.numbers(columns["lengths"], 4),
            sizes=packed.numbers(columns["sizes"], 8),
            sha256=columns["sha256"],
            files=files,
            **header,
        )

    def file(self, idx: int) -> str:
        """The file of a sample, relative to ``output``."""
        return self.files.get(idx) or file_name(idx)

    @property
    def tokens(self) -> int:
        """Of all its samples."""
        return sum(self.lengths)


def take(host: str, output: str, now: Mapping[str, Any], run: str = "", share: str = "") -> Catalogue:
    """A host's catalogue. ``now``: the identity that a run would have (IDENTITY's keys, as far as known). Reads only.

    Counted is what the book calls done and whose file is there in its size, or was moved to a remote. Raises HsError where the book cannot be read or
    the folder belongs to another extraction.
    """
    identity = {key: now.get(key) for key in IDENTITY}
    lengths, sizes, indices = array("I"), array("Q"), array("I")
    hashes = bytearray()
    files: Dict[int, str] = {}
    remotes: Dict[str, int] = {}
    folder = Path(output)
    if (folder / FILE).is_file():
        book = Manifest(folder, read_only=True)
        try:
            then = dict(book.identity(), release=book.get("release"))
            refuse_other(host, output, then, now)
            identity.update({key: then[key] for key in IDENTITY if then.get(key) is not None})
            root = str(folder) + os.sep
            remotes = book.moved_counts()["roots"]
            for idx, file, size, length, sha256, moved in book.done_rows():
                try:
                    if file is None or not (moved or os.stat(root + file).st_size == size):
                        continue
                except OSError:
                    continue
                indices.append(idx)
                lengths.append(length)
                sizes.append(size)
                hashes += bytes.fromhex(sha256)
                if file != file_name(idx):
                    files[idx] = file
        finally:
            book.close()
    return Catalogue(host, identity, output, indices, lengths, sizes, bytes(hashes), files, run, share, remotes)


def refuse_other(host: str, output: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """HsError where a host's own folder was made by another engine, model, data set or with other boundaries than a run would use now."""
    other = [
        key for key in IDENTITY if then.get(key) is not None and now.get(key) is not None and then[key] != now[key]
    ]
    if other:
        told = "; ".join(
            "{}: the folder has {}, a run now {}".format(NAMES.get(key, key), then[key], now[key]) for key in other
        )
        raise HsError(
            "the output folder {} of {} belongs to another extraction ({})".format(output, host, told),
            "everything: production was not touched",
            "choose another hs_output_dir, or run with what this one was made with",
        )


def reference(catalogues: Sequence[Catalogue]) -> Catalogue:
    """The one that the others must agree with: the first by name that holds samples, else the first by name."""
    ordered = sorted(catalogues, key=lambda one: one.host)
    return next((one for one in ordered if len(one.indices)), ordered[0])


def refusals(catalogues: Sequence[Catalogue]) -> Dict[str, str]:
    """Host -> why it may not be in one data set with the others, both named; empty where all agree."""
    if not catalogues:
        return {}
    first, refused = reference(catalogues), {}
    for one in catalogues:
        other = [
            key
            for key in IDENTITY
            if first.identity.get(key) is not None
            and one.identity.get(key) is not None
            and first.identity[key] != one.identity[key]
        ]
        if other:
            told = "; ".join(
                "{}: {} has {}, {} has {}".format(
                    NAMES.get(key, key), first.host, first.identity[key], one.host, one.identity[key]
                )
                for key in other
            )
            refused[one.host] = str(
                HsError(
                    "{} and {} may not fill one data set: {}".format(one.host, first.host, told),
                    "everything: production was not touched",
                    "make them alike, or leave one out: --limit for a host that is there, hs_fleet_forget={} for what is kept of it".format(
                        first.host
                    ),
                )
            )
    return refused


@dataclass(frozen=True)
class Merged:
    """Whose each sample is. owner: index -> (number of the catalogue, place in it); twice: samples that two hosts finished."""

    catalogues: List[Catalogue]
    owner: Dict[int, Tuple[int, int]]
    twice: int

    def counts(self) -> Dict[str, int]:
        """Host -> samples that are its."""
        owned = [0] * len(self.catalogues)
        for number, _ in self.owner.values():
            owned[number] += 1
        return {one.host: count for one, count in zip(self.catalogues, owned)}

    @property
    def tokens(self) -> int:
        """Of all samples, each once."""
        return sum(self.catalogues[one].lengths[place] for one, place in self.owner.values())

    @property
    def bytes(self) -> int:
        """Of their files."""
        return sum(self.catalogues[one].sizes[place] for one, place in self.owner.values())

    def lines(self) -> Iterator[str]:
        """Each sample once, by rising index, as JSON: idx, host, file, seq_len (tokens), bytes, sha256. By hand: there are a million."""
        hosts = [json.dumps(one.host) for one in self.catalogues]
        prefix = "hidden_states/hs_"
        for idx in sorted(self.owner):
            one, place = self.owner[idx]
            found = self.catalogues[one]
            file = found.files.get(idx)
            yield '{"idx":%d,"host":%s,"file":%s,"seq_len":%d,"bytes":%d,"sha256":"%s"}\n' % (
                idx,
                hosts[one],
                json.dumps(file) if file else '"%s%d.safetensors"' % (prefix, idx),
                found.lengths[place],
                found.sizes[place],
                found.sha256[32 * place : 32 * place + 32].hex(),
            )


def merge(catalogues: Sequence[Catalogue]) -> Merged:
    """All hosts' samples, each once: of two, the one of the first host by name.

    Raises HsError where the hosts may not be merged, or where two hold the same sample in different lengths or sizes.
    """
    refused = refusals(catalogues)
    if refused:
        raise HsError(refused[min(refused)])
    ordered = sorted(catalogues, key=lambda one: one.host)
    owner: Dict[int, Tuple[int, int]] = {}
    twice = 0
    for number, found in enumerate(ordered):
        lengths, sizes = found.lengths, found.sizes
        for place, idx in enumerate(found.indices):
            known = owner.setdefault(idx, (number, place))
            if known[0] == number:
                continue
            first = ordered[known[0]]
            twice += 1
            if (first.lengths[known[1]], first.sizes[known[1]]) != (lengths[place], sizes[place]):
                raise HsError(
                    "sample {} is {} tokens in {} bytes on {}, and {} tokens in {} bytes on {}".format(
                        idx,
                        first.lengths[known[1]],
                        first.sizes[known[1]],
                        first.host,
                        lengths[place],
                        sizes[place],
                        found.host,
                    ),
                    "everything: no catalogue was written",
                    "look at both files (python -m sglang_hs_client verify --checksums on both hosts); remove what is wrong there",
                )
    return Merged(ordered, owner, twice)


def document(merged: Merged, rows: int, tokens: int) -> Dict[str, Any]:
    """catalogue.json: the data set over all hosts. ``rows``, ``tokens``: of its valid samples."""
    known: Dict[str, Optional[Any]] = {}
    for one in merged.catalogues:
        known.update({key: value for key, value in one.identity.items() if value is not None})
    owned = merged.counts()
    return {
        "format": 1,
        "identity": known,
        "samples": len(merged.owner),
        "tokens": merged.tokens,
        "bytes": merged.bytes,
        "twice": merged.twice,
        "of": {"samples": rows, "tokens": tokens},
        "complete": len(merged.owner) == rows,
        "rows": "catalogue.jsonl",
        "hosts": {
            one.host: {
                "output": one.output,
                "samples": owned[one.host],
                "finished": len(one.indices),
                "remotes": one.remotes,
            }
            for one in merged.catalogues
        },
    }
