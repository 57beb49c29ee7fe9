"""``python -m sglang_hs_client verify --output DIR [--checksums] [--remote] [--redo]``: is what was accepted still what was written?

Without --checksums: each file's presence, size and header, as every run looks at them before it goes on. With it every byte is
read, which finds what no header shows: a changed bit. A sample that was moved and has no file here is right by the book, unless
--remote asks the remote: by its own sha256 where it has some, else (and with --checksums in any case) by reading every byte back.
--redo marks what is wrong to be extracted again by the next run and moves
the wrong file to quarantine/, so that no run can take it for a finished sample.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

from sglang_hs.errors import HsError
from sglang_hs.manifest import DONE, FILE, MOVED, Manifest, Sample
from sglang_hs.movesettings import Move
from sglang_hs.rclone import Failed, Rclone, claim

from .dumpfile import Expected, check_header, file_sha256
from .faults import SampleFault
from .output import STATES, Output

WRONG = 6  # exit code
PAGE = 1000  # samples in memory at a time
PATIENCE = 24 * 3600.0  # seconds for a page of files to be read back
SHOWN = 20  # lines, of each kind


def fault(output: Path, sample: Sample, expected: Expected, checksums: bool) -> Optional[str]:
    """What is wrong with a finished sample's file, None where nothing is."""
    if sample.file is None or sample.name is None:
        return "the book names no file for it"
    path = output / sample.file
    try:
        header = check_header(path, sample.length, sample.name, expected)
        if header.size != sample.bytes:
            return "{} bytes instead of {}".format(header.size, sample.bytes)
        if checksums and file_sha256(path) != sample.sha256:
            return "its bytes have changed since they were accepted (sha256)"
    except SampleFault as error:
        return error.reason
    except FileNotFoundError:
        return "the file is gone"
    except OSError as error:
        return "not readable: {}".format(error)
    return None


def at_remotes(book: Manifest, checksums: bool, output: Path) -> Dict[int, str]:
    """idx -> what is wrong with it, of each moved sample without a file here whose bytes at its remote are not those that were accepted.

    HsError where a remote cannot be asked.
    """
    move = Move.of(book.get("move") or {})
    tool = Rclone(move.rclone, move.config, move.options)
    wanted: Dict[str, Dict[str, Tuple[str, List[int]]]] = {}  # root -> file -> (sha256, its samples)
    archives = {found.file: found.sha256 for found in book.archives(MOVED)}
    for idx, file, _ in book.moved_here():
        place, sample = book.moved_to(idx), book.sample(idx)
        if place is None or sample is None or (output / file).exists():
            continue
        total = archives.get(place.file) if place.archive else sample.sha256
        wanted.setdefault(place.root, {}).setdefault(place.file, (str(total), []))[1].append(idx)
    wrong: Dict[int, str] = {}
    for root, files in wanted.items():
        names = sorted(files)
        try:
            # a mount point without its disk must not count as every sample lost
            claim(tool, root, book.mark(), "", write=False, known=len(files))
            for begin in range(0, len(names), PAGE):
                part = names[begin : begin + PAGE]
                found = {} if checksums else tool.hashes(root, part, "sha256", False, PATIENCE)
                rest = [name for name in part if name not in found]  # it has none, or could not tell in this moment
                found.update(tool.hashes(root, rest, "sha256", True, PATIENCE) if rest else {})
                for name in part:
                    if found.get(name) != files[name][0]:
                        reason = (
                            "its bytes at {} have changed (sha256)" if name in found else "it is not at {} any more"
                        )
                        wrong.update({idx: reason.format(root) for idx in files[name][1]})
        except Failed as error:
            raise HsError(
                "{} cannot be asked: {}".format(root, error), "everything", "mend that, or verify without --remote"
            ) from error
    return wrong


def verify(output: Path, checksums: bool, redo: bool, remote: bool = False) -> int:
    """Look at every finished sample of an output folder; print what is wrong. Returns 0, or WRONG if anything is."""
    if not (output / FILE).is_file():
        raise HsError("{} holds no extraction: there is no {}".format(output, FILE), next="give --output its folder")
    folder = Output(output)
    if redo:
        folder.open()  # nobody else may be at work; leftovers of a killed client go
    book = Manifest(output, read_only=not redo)
    try:
        far = at_remotes(book, checksums, output) if remote else None
        return _verify(folder, book, checksums, redo, far)
    finally:
        book.close()
        folder.close()


def _verify(folder: Output, book: Manifest, checksums: bool, redo: bool, far: Optional[Dict[int, str]]) -> int:
    known = book.identity()
    try:
        expected = Expected(len(known["boundaries"]) + 1, known["hidden_size"], known["dtype"], known["final"])
    except KeyError as error:
        raise HsError("the book of {} is not bound to an extraction yet".format(folder.folder)) from error
    counts = {"right": 0, "wrong": 0, "far": 0}

    def look(sample: Sample) -> Optional[str]:
        moved = sample.file is not None and book.moved_to(sample.idx) is not None
        if moved and not (folder.folder / str(sample.file)).exists():
            counts["far"] += 1  # one of several threads: a count for people
            return (far or {}).get(sample.idx)
        return fault(folder.folder, sample, expected, checksums)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for page in _pages(book):
            found = pool.map(look, page)
            for sample, reason in zip(page, found, strict=True):
                counts["right" if reason is None else "wrong"] += 1
                if reason is None:
                    continue
                if counts["wrong"] <= SHOWN:
                    print("sample {} ({}): {}".format(sample.idx, sample.file, reason))
                if redo:
                    _again(folder, book, sample, reason)
    strangers = list(_strangers(folder.folder, book))
    for name in strangers[:SHOWN]:
        print("{}/{}: no finished sample's file".format(STATES, name))
    left = book.counts()
    if counts["far"]:
        roots = ", ".join(book.moved_counts()["roots"])
        how = "whose bytes were looked at there" if far is not None else "where the book has them; --remote asks there"
        print("{} of them are at {}, {}".format(counts["far"], roots, how))
    print(
        "{} of {} finished samples are right by {}, {} wrong{}; {} pending, {} given up, {} bad rows; {} strange files".format(
            counts["right"],
            counts["right"] + counts["wrong"],
            "size, header and checksum" if checksums else "size and header (--checksums reads every byte)",
            counts["wrong"],
            ", to be extracted again by the next run" if redo and counts["wrong"] else "",
            left["pending"],
            left["failed"],
            left["bad"],
            len(strangers),
        )
    )
    return WRONG if counts["wrong"] or strangers else 0


def _again(folder: Output, book: Manifest, sample: Sample, reason: str) -> None:
    """The file first: one that stays in its place would be adopted by the next run if its header looks right."""
    facts: Dict[str, object] = {"name": sample.name, "tokens": sample.length, "found_by": "verify"}
    path = folder.folder / sample.file if sample.file is not None else None
    folder.quarantine(sample.idx, reason, facts, path)
    book.again(sample.idx)


def _pages(book: Manifest) -> Iterator[List[Sample]]:
    page: List[Sample] = []
    for sample in book.samples(DONE, page=PAGE):
        page.append(sample)
        if len(page) == PAGE:
            yield page
            page = []
    yield page


def _strangers(output: Path, book: Manifest) -> Iterator[str]:
    """Names in the samples' folder that belong to no finished sample."""
    with os.scandir(str(output / STATES)) as entries:
        for entry in entries:
            stem, _, suffix = entry.name.partition(".")
            number = stem[len("hs_") :] if stem.startswith("hs_") else ""
            sample = book.sample(int(number)) if number.isdigit() and suffix == "safetensors" else None
            if sample is None or sample.file != "{}/{}".format(STATES, entry.name):
                yield entry.name
