"""What hosts have finished of a data set: taken from each host's book, compared, merged into one catalogue on the controller.

A sample that two hosts finished is one sample: the first host by name has it. Hosts whose books belong to different extractions are
never merged: states of two engines, models or boundaries in one data set train to garbage.
"""

from __future__ import annotations

import json
import os
import sqlite3
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

PLACE = "hidden_states/hs_%d.safetensors"  # where the client puts a sample, relative to its output folder


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
                if file != PLACE % idx:
                    files[idx] = file
        except sqlite3.Error as error:
            raise HsError(
                "{} of {} cannot be read: {}".format(folder / FILE, host, error),
                "everything: it was only read",
                "look whether its disk is full or failing, or its share is gone; then start again",
            ) from error
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
    # key -> (its value, who says so): what the reference does not know is the first other's to say, so that no two differ in it
    known: Dict[str, Tuple[Any, str]] = {}
    for one in [first] + sorted((one for one in catalogues if one is not first), key=lambda one: one.host):
        mine = {key: one.identity[key] for key in IDENTITY if one.identity.get(key) is not None}
        other = [key for key in mine if key in known and known[key][0] != mine[key]]
        if not other:
            for key in mine:
                known.setdefault(key, (mine[key], one.host))
            continue
        against = known[other[0]][1]
        told = "; ".join(
            "{}: {} has {}, {} has {}".format(NAMES.get(key, key), known[key][1], known[key][0], one.host, mine[key])
            for key in other
        )
        refused[one.host] = str(
            HsError(
                "{} and {} may not fill one data set: {}".format(one.host, against, told),
                "everything: production was not touched",
                "make them alike, or leave one out: --limit for a host that is there, hs_fleet_forget={} for what is kept of it".format(
                    against
                ),
            )
        )
    return refused


@dataclass(frozen=True)
class Merged:
    """Whose each sample is. owner: by index, the number of the catalogue from 1, 0 of a sample that nobody has; place: where it is in that one.

    samples: how many there are, tokens and bytes: theirs, each counted once; twice: samples that two hosts finished; owned: by catalogue.
    """

    catalogues: List[Catalogue]
    owner: "array[int]"
    place: "array[int]"
    samples: int
    tokens: int
    bytes: int
    twice: int
    owned: List[int]

    def counts(self) -> Dict[str, int]:
        """Host -> samples that are its."""
        return {one.host: count for one, count in zip(self.catalogues, self.owned)}

    def has(self, idx: int) -> bool:
        """Whether anybody finished a sample."""
        return idx < len(self.owner) and self.owner[idx] > 0

    def lines(self) -> Iterator[str]:
        """Each sample once, by rising index, as JSON: idx, host, file, seq_len (tokens), bytes, sha256. By hand: there are a million."""
        rest = ',"seq_len":%d,"bytes":%d,"sha256":"%s"}\n'
        sources = []
        for one in self.catalogues:
            head = '{"idx":%d,"host":' + json.dumps(one.host).replace("%", "%%") + ',"file":'
            sources.append((head + json.dumps(PLACE) + rest, head, one.files, one.lengths, one.sizes, one.sha256.hex()))
        for idx, (number, place) in enumerate(zip(self.owner, self.place)):
            if number:
                line, head, files, lengths, sizes, sha256 = sources[number - 1]
                told = (lengths[place], sizes[place], sha256[64 * place : 64 * place + 64])
                if idx in files:
                    yield head % idx + json.dumps(files[idx]) + rest % told
                else:
                    yield line % (idx, idx, *told)


def merge(catalogues: Sequence[Catalogue]) -> Merged:
    """All hosts' samples, each once: of two, the one of the first host by name.

    Raises HsError where the hosts may not be merged, or where two hold the same sample in different lengths or sizes.
    """
    refused = refusals(catalogues)
    if refused:
        raise HsError(refused[min(refused)])
    ordered = sorted(catalogues, key=lambda one: one.host)
    # columns by index, not an object a sample: there are a million
    rows = max((one.indices[-1] + 1 for one in ordered if len(one.indices)), default=0)
    owner, places = array("I", bytes(4 * rows)), array("I", bytes(4 * rows))
    owned = [len(one.indices) for one in ordered]
    tokens, size = sum(sum(one.lengths) for one in ordered), sum(sum(one.sizes) for one in ordered)
    for number, found in enumerate(ordered, 1):
        for place, idx in enumerate(found.indices):
            if not owner[idx]:
                owner[idx], places[idx] = number, place
                continue
            first, at = ordered[owner[idx] - 1], places[idx]
            if (first.lengths[at], first.sizes[at]) != (found.lengths[place], found.sizes[place]):
                raise HsError(
                    "sample {} is {} tokens in {} bytes on {}, and {} tokens in {} bytes on {}".format(
                        idx,
                        first.lengths[at],
                        first.sizes[at],
                        first.host,
                        found.lengths[place],
                        found.sizes[place],
                        found.host,
                    ),
                    "everything: no catalogue was written",
                    "look at both files (python -m sglang_hs_client verify --checksums on both hosts); remove what is wrong there",
                )
            owned[number - 1] -= 1
            tokens -= found.lengths[place]
            size -= found.sizes[place]
    samples = sum(owned)
    twice = sum(len(one.indices) for one in ordered) - samples
    return Merged(ordered, owner, places, samples, tokens, size, twice, owned)


def document(merged: Merged, rows: int, tokens: int, missing: int) -> Dict[str, Any]:
    """catalogue.json: the data set over all hosts. ``rows``, ``tokens``: of its valid samples; ``missing``: how many of these nobody has."""
    known: Dict[str, Optional[Any]] = {}
    for one in merged.catalogues:
        known.update({key: value for key, value in one.identity.items() if value is not None})
    owned = merged.counts()
    return {
        "format": 1,
        "identity": known,
        "samples": merged.samples,
        "tokens": merged.tokens,
        "bytes": merged.bytes,
        "twice": merged.twice,
        "of": {"samples": rows, "tokens": tokens},
        "complete": not missing,
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
