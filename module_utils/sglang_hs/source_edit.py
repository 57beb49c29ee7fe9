"""Edit somebody else's Python file by insertion only, know at any time what state it is in, undo it to the byte.

``plan`` reads and decides, ``apply`` writes what a plan says, ``undo`` gives the original bytes back without knowing
the edits, ``inspect`` tells the state. All raise :class:`EditRefused`, a message in three parts, and nothing else.

An inserted block looks like this, and says by itself which file it was put into::

    # BEGIN <marker> [source_patch <version> block 1/1 of <hash of the whole original file>]
    ...
    # END <marker> [source_patch <version> block 1/1 of <hash of the whole original file>]

So what the original was is proven, not remembered: cut the blocks out, hash the rest, compare. The record and the
backup in ``backup_dir`` add what the file cannot say itself (its old mtime, and the bytes for a person who needs them).

Standard library only, Python 3.8 and later; knows no package's files.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import json
import os
import re
import stat
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from . import source_edit_anchors as anchors
from . import source_edit_files as files
from .errors import HsError
from .fsio import read_json, write_json
from .source_edit_files import EditRefused, sha256

__all__ = ["DEFAULT_MARKER", "EditRefused", "Plan", "apply", "inspect", "plan", "undo"]

DEFAULT_MARKER = "source_patch"
RECORD_FORMAT = 1

# The states of a file.
MISSING = "missing"  # it is not there
PRISTINE = "pristine"  # nothing of ours in it
REPLACED = "replaced"  # as pristine, but it is not the file that the record in backup_dir speaks of: upgraded since
PATCHED = "patched"  # our blocks, and nothing else changed
PATCHED_OTHER_VERSION = "patched_other_version"  # our blocks with other lines than asked for now, nothing else changed
FOREIGN = "foreign"  # our blocks, and somebody changed something else or broke a marker

_TAG = rb"\[source_patch (?P<version>[0-9a-f]{12}) block (?P<k>[0-9]+)/(?P<n>[0-9]+) of (?P<original>[0-9a-f]{16})\]"
_MARKER_LINE = re.compile(rb"[ \t\f]*# (?P<kind>BEGIN|END) (?P<marker>[\x20-\x7e]+) " + _TAG)
# Anything that was one of our markers before somebody changed the line.
_MARKER_TRACE = re.compile(rb"\[source_patch ")
_MARKER_TEXT = re.compile(r"[A-Za-z0-9](?:[\x20-\x7e]*[A-Za-z0-9.)])?\Z")


@dataclass
class Plan:
    """What ``apply`` would do, and what the file is now. Made by :func:`plan`; nothing in it is yet done."""

    path: str
    real_path: str
    state: str
    state_before: str
    state_after: str
    changed: bool
    before: bytes
    after: bytes
    backup_dir: str
    encoding: str = "utf-8"
    variant: Optional[str] = None
    patch_version: Optional[str] = None
    marker: Optional[str] = None
    insertions: List[Dict[str, Any]] = field(default_factory=list)
    sha256_pristine: Optional[str] = None
    backup: Optional[str] = None
    notes: List[str] = field(default_factory=list)
    pristine: bytes = b""
    pristine_mtime_ns: Optional[int] = None
    stale_record: bool = False  # the record is of another file
    spent_record: bool = False  # the record is of this file, which holds the original bytes

    def to_dict(self) -> Dict[str, Any]:
        """The plan in values that JSON can carry, without the bytes: what the module returns."""
        there = self.state_before != MISSING
        return {
            "changed": self.changed,
            "path": self.path,
            "real_path": self.real_path,
            "state_before": self.state_before,
            "state_after": self.state_after,
            "variant": self.variant,
            "patch_version": self.patch_version,
            "insertions": self.insertions,
            "sha256_before": sha256(self.before) if there else None,
            "sha256_after": sha256(self.after) if there else None,
            "sha256_pristine": self.sha256_pristine,
            "backup": self.backup,
            "notes": self.notes,
            "msg": _summary(self),
        }


class _Found(NamedTuple):
    """What the markers in a file say."""

    blocks: List[Tuple[int, int]]  # first and last line of each, from 1
    pristine: Optional[bytes]  # the original, proven by its hash
    version: Optional[str]
    marker: Optional[str]
    problem: Optional[str]  # why there is no proof, in words


_NOTHING = _Found([], None, None, None, None)


# -- the API -----------------------------------------------------------------------------------------------------------


def plan(
    path: str,
    variants: Optional[Sequence[Dict[str, Any]]],
    backup_dir: str,
    state: str = "present",
    marker: str = DEFAULT_MARKER,
) -> Plan:
    """Decide what to do with one file; reads only.

    ``variants`` is a list of ``{"name", "edits": [{"anchor", "lines"}], "requires", "forbids"}``; with ``state``
    "absent" it may be None. The one variant that fits the original bytes of the file is chosen, also when the file is
    patched by now.

    Raises EditRefused, with ``reason``:
    bad_edits (the data is wrong), relative_path, missing, not_a_file, too_large, unparsable, no_variant, ambiguous,
    already_there (the lines without their markers), other_marker, foreign, backup_dir, not_replaceable, os_error.
    """
    if state not in ("present", "absent"):
        raise EditRefused("bad_edits", "state {!r} is neither present nor absent.".format(state), "Correct it.")
    known: List[Dict[str, Any]] = []
    if state == "present":
        known = _usable_variants(variants)
        _check_marker(marker)
    result, found, info = _observe(path, backup_dir, state)
    if info is None:
        if state == "absent":
            return result
        raise EditRefused(
            "missing",
            "{} does not exist.".format(path),
            "Is the package installed, and in this environment?",
            "the host",
        )
    if found.problem:
        raise _foreign(result, found)
    if state == "present":
        _plan_present(result, known, marker, found)
    else:
        result.after = result.pristine
        if result.state_before == PATCHED:
            result.state_after = PRISTINE
    result.changed = result.after != result.before
    if result.changed:
        _check_replaceable(result, info)
    keep = _Keep(result.backup_dir, result.real_path)
    if state == "absent":
        result.backup = None
    elif result.changed:
        result.backup = keep.backup_name(str(result.sha256_pristine), result.pristine)
    return result


def apply(todo: Plan) -> Dict[str, Any]:
    """Do what a plan says, under a lock, and return ``Plan.to_dict()`` with what was done.

    The file is hashed again first: what another caller did meanwhile is found, not overwritten. A caller who was
    second to do the very same gets ``changed`` False. Killed at any point, it leaves the file whole: as it was or as
    planned.

    Raises EditRefused, with ``reason``: locked, changed_meanwhile, attribute_lost, os_error.
    """
    real, keep = todo.real_path, _Keep(todo.backup_dir, todo.real_path)
    tidy = todo.stale_record or (todo.spent_record and todo.state == "absent") or bool(files.leftovers(real))
    if todo.state_before == MISSING or not (todo.changed or tidy):
        return todo.to_dict()
    with files.locked(real) as held:
        if held:
            for name in files.leftovers(real):
                with contextlib.suppress(OSError):
                    os.unlink(name)
        if os.path.realpath(todo.path) != real:
            raise EditRefused(
                "changed_meanwhile", "{} leads to another file now.".format(todo.path), "Run again.", "both files"
            )
        current, info = files.read_regular(real)
        if current == todo.after and todo.changed:
            todo.changed, todo.state_before = False, todo.state_after
            todo.notes.append("Somebody else did the same meanwhile.")
            return todo.to_dict()
        if current != todo.before:
            raise EditRefused(
                "changed_meanwhile",
                "{} was changed by somebody else since it was read.".format(real),
                "Find out who edits it (a package upgrade?), then run again.",
                "that change; nothing was written",
            )
        if todo.stale_record:
            with files.plain_words("setting the old backup in {} aside".format(keep.folder)):
                keep.set_aside()
        if todo.changed and todo.state == "present":
            with files.plain_words("writing the backup in {}".format(keep.folder)):
                todo.backup = keep.save(todo, info)
        if todo.changed:
            sources = sorted({os.path.abspath(todo.path), real})
            with files.plain_words("removing compiled copies of {}".format(real)):
                files.remove_compiled(sources)
            wanted = todo.pristine_mtime_ns if todo.state == "absent" else None
            other = [] if todo.pristine_mtime_ns is None else [todo.pristine_mtime_ns]
            files.replace_bytes(real, sha256(current), todo.after, wanted, other)
            with contextlib.suppress(OSError):  # those that an import wrote in between; the mtime disowns them anyway
                files.remove_compiled(sources)
        if todo.state == "absent" and todo.backup_dir:
            with contextlib.suppress(
                OSError, HsError
            ):  # the file is right; what is left in our own folder does no harm
                keep.forget()
    return todo.to_dict()


def undo(path: str, backup_dir: str) -> Dict[str, Any]:
    """Give the original bytes (and the mtime, where it is on record) back, without knowing the edits.

    Nothing happens to a file without our blocks. A file that was upgraded meanwhile is such a file: it stays, and the
    backup of the old one is set aside, never put back. A file with our blocks and a foreign change is refused with
    the place: which bytes would be right there is not for a program to guess, and our block harms nobody meanwhile.

    Returns ``Plan.to_dict()``. Raises EditRefused, with a ``reason`` of :func:`plan` or :func:`apply`.
    """
    return apply(plan(path, None, backup_dir, state="absent"))


def inspect(path: str, backup_dir: str) -> Dict[str, Any]:
    """The state of a file, for a status page: reads only, and a foreign edit is an answer here, not an error.

    Returns state, msg, path, real_path, sha256, sha256_pristine, patch_version, variant, marker, backup, notes.
    Raises EditRefused when the file cannot be read, with a ``reason`` of :func:`plan`.
    """
    seen, found, _info = _observe(path, backup_dir, "absent")
    seen.state_before = FOREIGN if found.problem else seen.state_before
    there = seen.state_before != MISSING
    return {
        "state": seen.state_before,
        "msg": str(_foreign(seen, found)) if found.problem else _STATE_WORDS[seen.state_before].format(path),
        "path": path,
        "real_path": seen.real_path,
        "sha256": sha256(seen.before) if there else None,
        "sha256_pristine": seen.sha256_pristine,
        "patch_version": found.version,
        "variant": seen.variant,
        "marker": found.marker,
        "backup": seen.backup,
        "notes": seen.notes,
    }


_STATE_WORDS = {
    MISSING: "{} does not exist.",
    PRISTINE: "{} holds nothing of ours.",
    REPLACED: "{} holds nothing of ours; it was replaced since it was patched (a package upgrade?).",
    PATCHED: "{} is patched and otherwise as it was installed.",
}


# -- deciding ----------------------------------------------------------------------------------------------------------


def _observe(path: str, backup_dir: str, state: str) -> Tuple[Plan, _Found, Optional[os.stat_result]]:
    """What the file and the record say: a plan that changes nothing yet, the blocks, the stat (None: no such file)."""
    real = _real_path(path)
    if not os.path.lexists(real):
        return Plan(path, real, state, MISSING, MISSING, False, b"", b"", backup_dir), _NOTHING, None
    data, info = files.read_regular(real)
    try:
        folder = files.check_backup_dir(backup_dir, real, info.st_uid)
        record, notes = _Keep(folder, real).load()
    except EditRefused as error:
        if state != "absent":
            raise
        folder, record, notes = (
            "",
            None,
            ["The backup folder was not used: {}".format(error.what)],
        )  # an undo can do without
    found = _find_blocks(data, str(record.get("patch_version")) if record else None)
    seen = Plan(path, real, state, PRISTINE, PRISTINE, False, data, data, folder, notes=notes, pristine=data)
    if found.problem:
        seen.sha256_pristine = record["sha256_pristine"] if record else None
        seen.backup = record["backup"] if record else None
        return seen, found, info
    if found.pristine is None:
        seen.pristine_mtime_ns = info.st_mtime_ns
    else:
        seen.state_before = seen.state_after = PATCHED
        seen.pristine = found.pristine
        seen.marker, seen.patch_version = found.marker, found.version
        seen.insertions = _existing(data, found)
    seen.sha256_pristine = sha256(seen.pristine)
    if record and record["sha256_pristine"] == seen.sha256_pristine:
        seen.spent_record = found.pristine is None
        seen.variant = record.get("variant") if found.pristine is not None else None
        seen.pristine_mtime_ns = record["mtime_ns"]
        seen.backup = record["backup"] if os.path.exists(record["backup"]) else None
    elif record:
        seen.stale_record = True
        if found.pristine is None:
            seen.state_before = seen.state_after = REPLACED
        seen.notes.append(
            "The backup of an earlier file (sha256 {}) does not belong to this one and is set aside.".format(
                record["sha256_pristine"][:12]
            )
        )
    return seen, found, info


def _plan_present(result: Plan, variants: List[Dict[str, Any]], marker: str, found: _Found) -> None:
    """Fill in the edited bytes, from the original ones whatever the file holds now."""
    if found.marker is not None and found.marker != marker:
        raise EditRefused(
            "other_marker",
            "{} already carries another edit, marked {!r}.".format(result.real_path, found.marker),
            "Undo that one first, or use its marker.",
        )
    with _collector_at_rest():  # until the trees are gone again
        _edit(result, variants, marker)
    if found.pristine is not None and result.after != result.before:
        result.state_before = PATCHED_OTHER_VERSION
    result.state_after = PATCHED


def _edit(result: Plan, variants: List[Dict[str, Any]], marker: str) -> None:
    source = anchors.Source(result.pristine, result.real_path)
    variant, places = _choose(source, variants)
    version = _version(variant, marker)
    after, insertions = _insert(source, variant, places, marker, version)
    _prove(source, after, insertions)
    result.encoding, result.variant, result.marker = source.encoding, variant["name"], marker
    result.patch_version, result.insertions, result.after = version, insertions, after


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from looking through syntax trees over and over: 0.15 s instead of 0.5 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _choose(source: anchors.Source, variants: List[Dict[str, Any]]) -> Tuple[Dict[str, Any], List[anchors.Place]]:
    """The one variant that fits, and its places."""
    fitting: List[Tuple[Dict[str, Any], List[anchors.Place]]] = []
    misses = []
    for variant in variants:
        problems, places = _try(source, variant)
        if problems:
            misses.append("{}: {}".format(variant["name"], "; ".join(problems)))
        else:
            fitting.append((variant, places))
    if not fitting:
        raise EditRefused(
            "no_variant",
            "{} has a layout that no variant knows. {}.".format(source.path, ". ".join(misses)),
            "It is a release that the edits were not written for: use a known one, or add a variant.",
        )
    outcomes = {
        json.dumps([[place.offset, edit["lines"]] for place, edit in zip(places, variant["edits"])])
        for variant, places in fitting
    }
    if len(outcomes) > 1:
        raise EditRefused(
            "ambiguous",
            "{} fits {} variants that edit it differently: {}.".format(
                source.path, len(fitting), ", ".join(variant["name"] for variant, _places in fitting)
            ),
            "Tell the variants apart with requires or forbids.",
        )
    return fitting[0]


def _try(source: anchors.Source, variant: Dict[str, Any]) -> Tuple[List[str], List[anchors.Place]]:
    problems = []
    for condition in variant.get("requires") or []:
        try:
            anchors.find_nodes(source, condition)
        except anchors.NoMatch as error:
            problems.append("requires {}: {}".format(anchors.describe(condition), error))
    for condition in variant.get("forbids") or []:
        with contextlib.suppress(anchors.NoMatch):
            anchors.find_nodes(source, condition)
            problems.append("forbids {}, which is there".format(anchors.describe(condition)))
    places = []
    for edit in variant["edits"]:
        try:
            place = anchors.find_place(source, edit["anchor"])
            _check_not_there(source, place, edit["lines"])
            places.append(place)
        except anchors.NoMatch as error:
            problems.append("anchor {}: {}".format(anchors.describe(edit["anchor"]), error))
    return problems, places


def _check_not_there(source: anchors.Source, place: anchors.Place, lines: List[str]) -> None:
    """Refuse when the lines stand at their place already, their markers taken away by hand."""
    wanted = [line.strip().encode("utf-8") for line in lines if line.strip()]
    index = source.offsets.index(place.offset) if place.offset in source.offsets else 0
    before = list(
        itertools.islice((line.strip() for line in reversed(source.lines[:index]) if line.strip()), len(wanted))
    )[::-1]
    behind = [line.strip() for line in source.lines[index : index + 4 * len(wanted)] if line.strip()][: len(wanted)]
    if wanted in (before, behind):
        raise EditRefused(
            "already_there",
            "The lines stand in {} already, without markers, {}.".format(source.path, place.where),
            "Somebody put them there or took the markers away: put the original file back (reinstall the package).",
        )


def _insert(
    source: anchors.Source, variant: Dict[str, Any], places: List[anchors.Place], marker: str, version: str
) -> Tuple[bytes, List[Dict[str, Any]]]:
    """The edited bytes, and where each block is in them."""
    tag = "[source_patch {} block {{}}/{} of {}]".format(version, len(places), sha256(source.data)[:16])
    after, at_end = b"", b""
    insertions: List[Dict[str, Any]] = []
    position = 0
    body = len(anchors.BOM) if source.data.startswith(anchors.BOM) else 0
    # At one offset the deeper block comes first: the end of a method before the end of its class.
    for index in sorted(range(len(places)), key=lambda i: (places[i].offset, -len(places[i].indent))):
        place, lines = places[index], variant["edits"][index]["lines"]
        mark = "{} " + tag.format(index + 1)
        block = ["# BEGIN " + mark.format(marker), *lines, "# END " + mark.format(marker)]
        shown = [_indented(line, place, source) for line in block]
        text = b"".join(line + place.eol for line in shown)
        after += source.data[position : place.offset]
        position = place.offset
        if place.offset == len(source.data) > body and not (after.endswith((b"\n", b"\r"))):
            after, at_end = after + place.eol, place.eol  # the file has no final newline: nor will the edited one
        insertions.append(
            {
                "line": len(anchors.split_lines(after[body:])) + 1,
                "lines": [line.decode("utf-8", "backslashreplace") for line in shown],
                "where": place.where,
            }
        )
        after += text
    after += source.data[position:]
    return (after[: -len(at_end)] if at_end else after), insertions


def _indented(line: str, place: anchors.Place, source: anchors.Source) -> bytes:
    text = line.rstrip()
    if not text:
        return b""
    inner = text[: len(text) - len(text.lstrip(" "))]
    if place.indent and not place.indent.strip(b"\t"):  # a file indented by tabs
        inner = "\t" * (len(inner) // 4) + " " * (len(inner) % 4)
    encoding = "utf-8" if source.encoding == "utf-8-sig" else source.encoding
    try:
        return place.indent + (inner + text.lstrip(" ")).encode(encoding)
    except UnicodeError as error:
        raise EditRefused(
            "bad_edits",
            "The line {!r} cannot be written in the encoding of {}, {}.".format(text, source.path, encoding),
            "Write it in ASCII.",
        ) from error


def _prove(source: anchors.Source, after: bytes, insertions: List[Dict[str, Any]]) -> None:
    """Compile the edited bytes, and show that they are the original plus the blocks: in bytes and in meaning."""
    spans = [(entry["line"], entry["line"] + len(entry["lines"]) - 1) for entry in insertions]
    try:
        tree = anchors.parse(after, source.path)
        same = anchors.encoding_of(anchors.split_lines(after)) == source.encoding
        same = same and anchors.same_but_inserted(source.tree, tree, spans)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(anchors.touched(tree, spans), source.path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise EditRefused(
            "would_not_compile",
            "With the lines inserted, {} would not compile: {} (line {}).".format(
                source.path, getattr(error, "msg", error), getattr(error, "lineno", "unknown")
            ),
            "Correct the lines of the edit.",
        ) from error
    found = _find_blocks(after)
    if not same or found.pristine != source.data:
        raise EditRefused(
            "not_an_insertion",
            "The lines would change the meaning of {} around them.".format(source.path),
            "Choose another anchor.",
        )


def _version(variant: Dict[str, Any], marker: str) -> str:
    text = json.dumps([RECORD_FORMAT, marker, variant["edits"]], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


# -- recognising -------------------------------------------------------------------------------------------------------


def _find_blocks(data: bytes, on_record: Optional[str] = None) -> _Found:
    """Find our blocks and prove what the file was without them.

    ``on_record`` is the version of the edit that the record says is in the file.
    """
    if not _MARKER_TRACE.search(data):
        return _NOTHING
    bom = anchors.BOM if data.startswith(anchors.BOM) else b""
    lines = anchors.split_lines(data[len(bom) :])
    traces = [number for number, line in enumerate(lines, 1) if _MARKER_TRACE.search(line)]
    first = _read_blocks(bom, lines, traces)
    if first.pristine is not None:
        return first
    # A docstring or a test may quote a marker: only a comment is one.
    with contextlib.suppress(SyntaxError, UnicodeError, LookupError):
        comments = anchors.comment_lines(data.decode(anchors.encoding_of(anchors.split_lines(data))))
        if comments is not None:
            real = sorted(set(traces) & set(comments))
            if real:
                return _read_blocks(bom, lines, real)
            if not on_record or "[source_patch {} ".format(on_record).encode("utf-8") not in data:
                return _NOTHING
            # It is our very block: a foreign change has made a text of it.
    return first


def _read_blocks(bom: bytes, lines: List[bytes], traces: List[int]) -> _Found:
    blocks: List[Tuple[int, int]] = []
    tags = set()
    numbers = []
    open_at, open_tag = 0, b""
    problem = None
    for number in traces:
        line = lines[number - 1].rstrip(b"\r\n")
        match = _MARKER_LINE.fullmatch(line)
        if match is None:
            problem = problem or "line {} is a changed marker".format(number)
            continue
        tags.add((match["marker"], match["version"], match["n"], match["original"]))
        tag = line[match.end("kind") :]
        if match["kind"] == b"BEGIN":
            if open_at:
                problem = problem or "the block that begins at line {} has no end".format(open_at)
            open_at, open_tag = number, tag
        elif not open_at or tag != open_tag:
            problem = problem or "the end at line {} has no beginning".format(number)
        else:
            blocks.append((open_at, number))
            numbers.append(int(match["k"]))
            open_at = 0
    if open_at:
        problem = problem or "the block that begins at line {} has no end".format(open_at)
    if len(tags) != 1:
        return _Found(blocks, None, None, None, problem or "the markers are of several edits")
    marker, version, count, original = tags.pop()
    if problem is None and sorted(numbers) != list(range(1, int(count) + 1)):
        problem = "{} of {} blocks are there".format(len(numbers), int(count))
    if problem is None:
        pristine = bom + _cut_out(lines, blocks)
        if sha256(pristine)[:16] == original.decode("ascii"):
            return _Found(blocks, pristine, version.decode("ascii"), marker.decode("ascii"), None)
        problem = "the rest of the file is not what it was when the block was put in"
    return _Found(blocks, None, version.decode("ascii"), marker.decode("ascii"), problem)


def _cut_out(lines: List[bytes], blocks: List[Tuple[int, int]]) -> bytes:
    inside = {number for first, last in blocks for number in range(first, last + 1)}
    kept = [line for number, line in enumerate(lines, 1) if number not in inside]
    if kept and len(lines) in inside and not lines[-1].endswith((b"\n", b"\r")):
        # A block at the end of a file without a final newline: the line end before the block is ours.
        kept[-1] = kept[-1][: -2 if kept[-1].endswith(b"\r\n") else -1]
    return b"".join(kept)


def _existing(data: bytes, found: _Found) -> List[Dict[str, Any]]:
    lines = anchors.split_lines(data)
    return [
        {
            "line": first,
            "lines": [line.rstrip(b"\r\n").decode("utf-8", "backslashreplace") for line in lines[first - 1 : last]],
            "where": "lines {} to {}".format(first, last),
        }
        for first, last in found.blocks
    ]


def _foreign(seen: Plan, found: _Found) -> EditRefused:
    """The refusal of a file that holds our blocks and more changes, with the place."""
    lines = anchors.split_lines(seen.before)
    place, copy = "", ""
    original = b""
    with contextlib.suppress(OSError):
        original = Path(seen.backup).read_bytes() if seen.backup else b""
    if original and sha256(original) == seen.sha256_pristine:
        place = _first_difference(lines, anchors.split_lines(original), found.blocks)
        copy = ", or copy {}".format(seen.backup)
    ours = ", ".join("{}-{}".format(first, last) for first, last in found.blocks)
    return EditRefused(
        "foreign",
        "{} holds our edit and a foreign change: {}.{}".format(seen.real_path, found.problem, place),
        "Put the original back (reinstall the package{}), or take the foreign change out.{}".format(
            copy, " Our lines are {}.".format(ours) if ours else ""
        ),
        "the file, with our lines and the foreign change",
    )


def _first_difference(lines: List[bytes], original: List[bytes], blocks: List[Tuple[int, int]]) -> str:
    inside = {number for first, last in blocks for number in range(first, last + 1)}
    rest = [(number, line) for number, line in enumerate(lines, 1) if number not in inside]
    for index, (number, line) in enumerate(rest):
        if index >= len(original) or line != original[index]:
            text = line.rstrip(b"\r\n").decode("utf-8", "backslashreplace")
            return " The first difference from the original is line {}: {!r}.".format(number, text[:80])
    return " After line {} lines of the original are missing.".format(len(lines))


# -- the backup and its record -----------------------------------------------------------------------------------------


class _Keep:
    """What we keep of one file in the backup folder: a record, and the original bytes under a name with their hash."""

    def __init__(self, folder: str, real: str) -> None:
        self.folder = folder
        self.real = real
        self.key = "{}.{}".format(os.path.basename(real), sha256(os.fsencode(real))[:12])
        self.record = os.path.join(folder, self.key + ".json")

    def load(self) -> Tuple[Optional[Dict[str, Any]], List[str]]:
        """The record, or None; and a note when there is one that cannot be used (nothing depends on it)."""
        try:
            value = read_json(Path(self.record))
        except (HsError, OSError, UnicodeError):
            value = {}
        if value is None:
            return None, []
        if not (
            isinstance(value, dict)
            and value.get("format") == RECORD_FORMAT
            and value.get("real_path") == self.real
            and isinstance(value.get("sha256_pristine"), str)
            and isinstance(value.get("mtime_ns"), (int, type(None)))
            and isinstance(value.get("backup"), str)
        ):
            return None, ["The record {} cannot be read and was not used.".format(self.record)]
        return value, []

    def save(self, todo: Plan, info: os.stat_result) -> str:
        """Keep the original, created exclusively and never overwritten, then the record. Returns the backup's path."""
        if not os.path.isdir(self.folder):
            os.makedirs(self.folder, mode=0o700)
        digest = sha256(todo.pristine)
        backup = self.backup_name(digest, todo.pristine)
        if not os.path.lexists(backup):
            files.write_new(backup, todo.pristine, like=info, mtime_ns=todo.pristine_mtime_ns)
        write_json(
            Path(self.record),
            {
                "format": RECORD_FORMAT,
                "path": todo.path,
                "real_path": self.real,
                "sha256_pristine": digest,
                "sha256_patched": sha256(todo.after),
                "patch_version": todo.patch_version,
                "variant": todo.variant,
                "marker": todo.marker,
                "insertions": todo.insertions,
                "backup": backup,
                "mode": stat.S_IMODE(info.st_mode),
                "uid": info.st_uid,
                "gid": info.st_gid,
                "mtime_ns": todo.pristine_mtime_ns,  # None: patched without a record, so nobody knows any more
                "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        )
        return backup

    def backup_name(self, digest: str, data: bytes) -> str:
        """A free name, or the name of a backup that already holds these very bytes."""
        number = 1
        while True:
            name = os.path.join(
                self.folder, "{}.{}{}.orig".format(self.key, digest[:12], "" if number == 1 else f".{number}")
            )
            if not os.path.lexists(name):
                return name
            with contextlib.suppress(OSError):
                if not os.path.islink(name) and Path(name).read_bytes() == data:
                    return name
            number += 1

    def set_aside(self) -> None:
        """Move the record of another file and its backup out of the way, into ``stale/``; nothing is deleted."""
        record, _notes = self.load()
        stale = os.path.join(self.folder, "stale")
        os.makedirs(stale, mode=0o700, exist_ok=True)
        stamp = "{}.{}".format(time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), os.urandom(3).hex())
        if record and os.path.dirname(record["backup"]) == self.folder and os.path.lexists(record["backup"]):
            os.rename(record["backup"], os.path.join(stale, "{}.{}".format(os.path.basename(record["backup"]), stamp)))
        os.rename(self.record, os.path.join(stale, "{}.{}".format(os.path.basename(self.record), stamp)))

    def forget(self) -> None:
        """After an undo: the file itself is the original again, so record and backup are no longer needed."""
        record, _notes = self.load()
        if record is not None and sha256(files.read_regular(self.real)[0]) == record["sha256_pristine"]:
            if os.path.dirname(record["backup"]) == self.folder:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(record["backup"])
            os.unlink(self.record)  # last: as long as it is there, the next undo finds what is left to tidy
        for name in os.listdir(self.folder):  # what a killed run left half-written
            ours = name.startswith((self.key + ".", "." + self.key + ".json."))
            if ours and (name.endswith(".tmp") or name.startswith(".")):
                os.unlink(os.path.join(self.folder, name))


# -- checks of what we are given ---------------------------------------------------------------------------------------


def _real_path(path: str) -> str:
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path:
        raise EditRefused(
            "relative_path", "{!r} is not an absolute path.".format(path), "Give the whole path.", "everything"
        )
    return os.path.realpath(path)


def _check_replaceable(result: Plan, info: os.stat_result) -> None:
    obstacle = files.why_not_replaceable(result.real_path, info)
    if obstacle is None and result.state == "present":
        why = files.why_not_writable(result.backup_dir)
        obstacle = ("The backup cannot be written: {}.".format(why), "Give another backup_dir.") if why else None
    if obstacle is not None:
        raise EditRefused("not_replaceable", obstacle[0], obstacle[1])
    if info.st_nlink > 1:
        result.notes.append(
            "{} has {} names (hard links, as some installers make them); this name gets a file of its own, the others "
            "keep the old content.".format(result.real_path, info.st_nlink)
        )


def _check_marker(marker: Any) -> None:
    if (
        not isinstance(marker, str)
        or not 3 <= len(marker) <= 80
        or not _MARKER_TEXT.match(marker)
        or "coding" in marker
    ):
        raise EditRefused(
            "bad_edits",
            "The marker {!r} is not one line of 3 to 80 ASCII characters that begins with a letter or digit.".format(
                marker
            ),
            "Give another marker.",
        )


def _usable_variants(variants: Any) -> List[Dict[str, Any]]:
    """The variants in one form, so that equal edits have equal versions however they are written.

    Refuses what is not of the documented shape, naming it.
    """
    for trouble in _variant_troubles(variants):
        raise EditRefused("bad_edits", "The edits are not usable: {}.".format(trouble), "Correct them.")
    return [
        {
            **variant,
            "edits": [
                {
                    "anchor": {key: value for key, value in edit["anchor"].items() if value},
                    "lines": [line.rstrip() for line in _as_lines(edit["lines"])],
                }
                for edit in variant["edits"]
            ],
        }
        for variant in variants
    ]


def _as_lines(lines: Any) -> List[str]:
    """The lines of an edit, which may be written as a list or as one text."""
    return lines.rstrip("\n").split("\n") if isinstance(lines, str) else list(lines)


def _variant_troubles(variants: Any) -> Iterator[str]:
    if not isinstance(variants, (list, tuple)) or not variants:
        yield "variants is not a list with at least one entry"
        return
    names = []
    for number, variant in enumerate(variants, 1):
        where = "variant {}".format(number)
        yield from _key_troubles(variant, where, {"name", "edits"}, {"requires", "forbids"})
        if not isinstance(variant["name"], str) or not variant["name"]:
            yield "{}: name is not a text".format(where)
        names.append(variant["name"])
        where = "variant {}".format(variant["name"])
        if not isinstance(variant["edits"], (list, tuple)) or not variant["edits"]:
            yield "{}: edits is not a list with at least one entry".format(where)
        for index, edit in enumerate(variant["edits"], 1):
            at = "{}, edit {}".format(where, index)
            yield from _key_troubles(edit, at, {"anchor", "lines"}, set())
            yield from _anchor_troubles(edit["anchor"], at + ", anchor", condition=False)
            yield from _line_troubles(edit["lines"], at)
        for kind in ("requires", "forbids"):
            conditions = variant.get(kind) or []
            if not isinstance(conditions, (list, tuple)):
                yield "{}: {} is not a list".format(where, kind)
            for index, condition in enumerate(conditions, 1):
                yield from _anchor_troubles(condition, "{}, {} {}".format(where, kind, index), condition=True)
    if len(set(names)) != len(names):
        yield "two variants have the same name"


def _key_troubles(value: Any, where: str, needed: Any, optional: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield "{} is not a dictionary".format(where)
        return
    for key in sorted(needed - set(value)):
        yield "{} has no {}".format(where, key)
    for key in sorted(str(key) for key in set(value) - needed - optional):
        yield "{} has an unknown key {}".format(where, key)


def _anchor_troubles(anchor: Any, where: str, condition: bool) -> Iterator[str]:
    scope = {"class", "function", "statement"}
    yield from _key_troubles(
        anchor, where, set() if condition else {"position"}, scope if condition else scope | {"early_return"}
    )
    if not condition and anchor["position"] not in ("before", "after", "start", "end"):
        yield "{}: position {!r} is none of before, after, start, end".format(where, anchor["position"])
    for key in sorted(scope & set(anchor)):
        if anchor[key] is not None and (not isinstance(anchor[key], str) or not anchor[key].strip()):
            yield "{}: {} is not a text".format(where, key)
    if not any(anchor.get(key) for key in scope) and (condition or anchor["position"] not in ("start", "end")):
        yield "{} names no class, function or statement".format(where)
    for key in ("class", "function"):
        if anchor.get(key) and not all(part.isidentifier() for part in anchor[key].split(".")):
            yield "{}: {} {!r} is not a name".format(where, key, anchor[key])
    if anchor.get("statement"):
        try:
            anchors.parse_pattern(anchor["statement"])
        except ValueError as error:
            yield "{}: statement {!r} is {}".format(where, anchor["statement"], error)
    if not isinstance(anchor.get("early_return", False), bool):
        yield "{}: early_return is neither true nor false".format(where)


def _line_troubles(lines: Any, where: str) -> Iterator[str]:
    is_list = isinstance(lines, (list, tuple)) and all(isinstance(line, str) for line in lines)
    if not (is_list or isinstance(lines, str)) or not "".join(lines).strip():
        yield "{}: lines is neither a list of texts nor a text, or there is nothing in it".format(where)
        return
    for line in _as_lines(lines):
        if re.search(r"[\r\n\f\v\0\t]", line):
            yield "{}: the line {!r} holds a line end, a tab or another control character".format(where, line)
        if _MARKER_TRACE.search(line.encode("utf-8", "replace")):
            yield "{}: the line {!r} looks like a marker".format(where, line)
    yield from anchors.code_troubles(_as_lines(lines), where)


def _summary(todo: Plan) -> str:
    if todo.state_before == MISSING:
        return "{} does not exist; there is nothing to undo.".format(todo.path)
    if todo.state == "present":
        if not todo.changed:
            return "{} is patched already ({}, version {}).".format(todo.path, todo.variant, todo.patch_version)
        return "{} patched ({}, version {}).".format(todo.path, todo.variant, todo.patch_version)
    if todo.changed:
        return "{} holds its original bytes again.".format(todo.path)
    if todo.state_before == REPLACED:
        return "{} was replaced since it was patched; it holds nothing of ours and was left alone.".format(todo.path)
    return "{} holds nothing of ours.".format(todo.path)
