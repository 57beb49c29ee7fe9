"""All hosts' samples as one output folder, of links: what the exporter and the trainers' readers open as if one host had made it.

Made where every host's output folder can be reached (a share, or what was copied there). Nothing is copied but the text of samples.jsonl.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Tuple

from . import fsio
from .errors import HsError
from .manifest import FILE, SAMPLES, Manifest

UNTOUCHED = "every host's samples"
MARK = ".joined"  # whose folder this is
NAME = re.compile(r"hs_(\d+)\.safetensors")


def join(path: Path, places: Mapping[str, str], to: Path) -> str:
    """Make ``to`` from the catalogue ``path`` (catalogue.jsonl). ``places``: host -> its output folder, seen from here. Returns a line.

    Raises HsError where a folder or a file is missing: then ``to`` has no manifest.json, and is no data set.
    """
    document = fsio.read_json(path.with_suffix(".json")) or {}
    owners = sorted(host for host, one in document["hosts"].items() if one["samples"])
    for host in owners:
        place = places.get(host)
        if place is None or not (Path(place) / "manifest.json").is_file():
            raise HsError(
                "the samples of {} are not at {}: no manifest.json".format(host, place or "any place that was named"),
                UNTOUCHED,
                _moved(document["hosts"][host])
                + "name its output folder as it is seen from here (hs_fleet_place); a host that was lost in the middle has no "
                "description of its samples until it came to its end once",
            )
    _refuse_theirs(to, places)
    (to / "hidden_states").mkdir(parents=True, exist_ok=True)
    # what an export made of it before is of the samples of then
    for name in [
        "manifest.json",
        FILE,
        "state.json",
        "dataset_info.json",
        *(path.name for path in to.glob("data-*.arrow")),
    ]:
        with contextlib.suppress(FileNotFoundError):
            (to / name).unlink()
    (to / MARK).touch()
    book = Manifest(to, lag=3600)
    try:
        described = fsio.read_json(Path(places[owners[0]]) / "manifest.json") or {}
        book.claim({key: value for key, value in document["identity"].items() if key != "release"})
        book.set("release", document["identity"].get("release"))
        owner: Dict[int, str] = {}
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                source = Path(places[row["host"]]) / row["file"]
                _same(source, row, _moved(document["hosts"][row["host"]]))
                name = "hidden_states/hs_{}.safetensors".format(row["idx"])
                _link(source, to / name)
                owner[row["idx"]] = row["host"]
                book.add([(row["idx"], None, row["seq_len"], None)])
                book.done(row["idx"], name, row["bytes"], row["sha256"])
        book.set("entered", True)
        # of samples that nobody has any more
        for entry in os.scandir(str(to / "hidden_states")):
            found = NAME.fullmatch(entry.name)
            if found and entry.is_symlink() and int(found.group(1)) not in owner:
                os.unlink(entry.path)
        count = _samples(owners, places, owner, to / SAMPLES)
        if count != len(owner):
            raise HsError(
                "{:,} of {:,} samples have a line in their host's {}".format(count, len(owner), SAMPLES),
                UNTOUCHED,
                "let every host come to its end once (extract.yml), then join again",
            )
        counts = book.counts()
    finally:
        book.close()
    described.update(
        counts=counts,
        complete=document["complete"],
        size={"bytes": counts["bytes_done"], "GB": counts["bytes_done"] / 1e9, "GiB": counts["bytes_done"] / 2**30},
        samples={"file": SAMPLES, "rows": count},
        hosts=document["hosts"],
    )
    for key in ("share", "arrow", "run_id"):
        described.pop(key, None)
    fsio.write_json(to / "manifest.json", described, 0o644)
    return "{:,} samples joined in {}".format(count, to)


def _refuse_theirs(to: Path, places: Mapping[str, str]) -> None:
    """HsError unless ``to`` is new, empty or of an earlier join: what is in it is replaced, and a host's own folder is no copy."""
    real = os.path.realpath(str(to))
    for host in sorted(places):
        place = os.path.realpath(places[host]) if places[host] else ""
        if place and os.path.commonpath([real, place]) in (real, place):
            raise HsError(
                "{} is the output folder of {} ({}), or one is within the other".format(to, host, places[host]),
                UNTOUCHED,
                "set hs_fleet_joined to a folder of its own",
            )
    if os.path.lexists(str(to)) and not (to / MARK).is_file() and (not to.is_dir() or any(to.iterdir())):
        raise HsError(
            "{} holds what no join has made".format(to),
            "everything in it",
            "set hs_fleet_joined to a folder of its own",
        )


def _moved(host: Mapping[str, Any]) -> str:
    """What to do first where samples of a host moved on."""
    remotes = sorted(host.get("remotes") or {})
    return (
        "copy or mount {} (not as archives: those have readers of their own) and ".format(" and ".join(remotes))
        if remotes
        else ""
    )


def _same(source: Path, row: Mapping[str, Any], first: str) -> None:
    try:
        size = source.stat().st_size
    except OSError as error:
        raise HsError(
            "{}".format(error),
            UNTOUCHED,
            first + "see that the host's folder is mounted, or copied whole (hs_fleet_place)",
        ) from error
    if size != row["bytes"]:
        raise HsError(
            "{} has {:,} bytes, the catalogue says {:,}".format(source, size, row["bytes"]),
            UNTOUCHED,
            "copy it again, or take the catalogue anew (playbooks/catalogue.yml)",
        )


def _link(source: Path, place: Path) -> None:
    target = os.path.relpath(str(source.resolve()), str(place.parent.resolve()))
    if place.is_symlink() and os.readlink(str(place)) == target:
        return
    if place.is_symlink():
        place.unlink()
    os.symlink(target, str(place))


def _samples(hosts: List[str], places: Mapping[str, str], owner: Mapping[int, str], to: Path) -> int:
    """samples.jsonl of all, by index: each line from the host that has the sample."""

    def lines(host: str) -> Iterator[Tuple[int, bytes]]:
        with (Path(places[host]) / SAMPLES).open("rb") as handle:
            for line in handle:
                idx = json.loads(line)["idx"]
                if owner.get(idx) == host:
                    yield idx, line

    part = to.with_name(".{}.part".format(to.name))
    count = 0
    try:
        with part.open("wb") as handle:
            for _, line in heapq.merge(*(lines(host) for host in hosts)):
                handle.write(line)
                count += 1
    except OSError as error:
        raise HsError(str(error), UNTOUCHED, "let every host come to its end once, then join again") from error
    shutil.move(str(part), str(to))
    return count
