"""Past runs and their output folders: what there is, and how one is removed without harm to anything else.

What may go must be on the list, named in full, with a journal or a book of ours in it. Nothing is reached through a symbolic link, no other
file system is entered, and of an output folder only files go that an extraction writes: a stranger's file stays, and so does its folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import stat
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from . import fsio
from .errors import HsError
from .journal import Journal, Paths
from .manifest import FILE, SAMPLES, Manifest

UNTOUCHED = "everything: nothing was removed"
# of an output folder, by subfolder: what an extraction writes
OURS: Dict[str, str] = {
    "": r"manifest\.(?:sqlite(?:-journal)?|json)|samples\.jsonl|data-\d+-of-\d+\.arrow|dataset_info\.json|state\.json|\.lock"
    r"|archives\.json|\.(?:archives\.json|manifest\.json|samples\.jsonl|data-|dataset_info\.json|state\.json)\S*",
    "hidden_states": r"hs_\d+\.safetensors|\.hs_\S+",
    "archives": r"hidden_states-\d+\.safetensors",
    "quarantine": r"hs_\d+\.(?:json|safetensors)|\.hs_\S+",
    "runs": r"\d{8}-\d{6}-[0-9a-f]+\.json|\.\d{8}-\S+",
}


def known(state_dir: str, more: Sequence[str] = ()) -> Dict[str, Any]:
    """{runs, outputs, open}: each past run and output folder as a row for people; ``more``: output folders to look at beside the journals'.

    runs: {run_id, path, bytes, opened, closed, outcome, complete, open, output}. outputs: {path, there, ours, complete, samples, total, bytes,
    moved: {remote: samples}, runs, in_use}. Times are unix times.
    """
    paths = Paths(state_dir)
    opened = Journal.load(paths) if paths.state.is_dir() else None
    runs: List[Dict[str, Any]] = []
    if paths.runs.is_dir() and not paths.runs.is_symlink():
        for folder in sorted(paths.runs.iterdir()):
            if not folder.is_symlink() and folder.is_dir():
                runs.append(_run(folder, opened))
    places: Dict[str, List[str]] = {os.path.normpath(path): [] for path in more if path}
    for run in runs:
        if run["output"]:
            places.setdefault(os.path.normpath(run["output"]), []).append(run["run_id"])
    # the open run may also read an earlier run's folder as its data set
    used = [str(opened.settings.get(key) or "") for key in ("output_dir", "dataset")] if opened is not None else []
    in_use = [path for path in used if path]
    outputs = [_output(path, by, in_use) for path, by in sorted(places.items())]
    return {
        "runs": runs,
        "outputs": [found for found in outputs if found["there"]],
        "open": opened.run_id if opened is not None else None,
    }


def _run(folder: Path, opened: Optional[Journal]) -> Dict[str, Any]:
    is_open = opened is not None and opened.run_id == folder.name
    document = opened.document if opened is not None and is_open else _object(folder / "journal.json")
    result = _object(folder / "result.json")
    outcome = "open" if is_open else result.get("outcome") or ("failed" if document else "no journal")
    return {
        "run_id": folder.name,
        "path": str(folder),
        "bytes": sum(size for _, size in _files(folder)),
        "opened": document.get("opened"),
        "closed": (document.get("closed") or {}).get("at"),
        "outcome": outcome,
        "complete": outcome == "complete",
        "open": is_open,
        "ours": document.get("run_id") == folder.name,
        "output": (document.get("settings") or {}).get("output_dir"),
    }


def _output(path: str, runs: List[str], in_use: Sequence[str]) -> Dict[str, Any]:
    folder = Path(path)
    found: Dict[str, Any] = {
        "path": path,
        "there": os.path.lexists(path),
        "ours": False,
        "complete": False,
        "runs": runs,
    }
    found.update(samples=0, total=0, bytes=0, moved={}, in_use=any(_overlap(path, used) for used in in_use))
    if not _plain_folder(folder):
        return found
    counts = _counts(folder)
    if counts is not None:
        described = (folder / "manifest.json").is_file() and (folder / SAMPLES).is_file()
        found.update(ours=True, samples=counts["done"], total=counts["total"], moved=counts["moved"])
        found["complete"] = bool(counts["total"]) and not counts["pending"] and described and not counts["waiting"]
        found["bytes"] = sum(size for _, size in _files(folder))
    return found


def _object(path: Path) -> Dict[str, Any]:
    try:
        found = fsio.read_json(path)
    except (HsError, OSError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _counts(folder: Path) -> Optional[Dict[str, Any]]:
    """The counts, and as ``moved`` how many are at which remote, of the book of ours in ``folder``; None where there is none that is bound to an extraction."""
    path = folder / FILE
    if path.is_symlink() or not path.is_file():
        return None
    try:
        book = Manifest(folder, read_only=True)
    except (HsError, sqlite3.Error):
        return None
    try:
        if not book.identity():
            return None
        counts, moved = book.counts(), book.moved_counts()
        # samples that are to move and have not: this is their only place
        waiting = counts["done"] - moved["moved"] if (book.get("move") or {}).get("to") else 0
        return dict(counts, moved=moved["roots"], waiting=waiting)
    except sqlite3.Error:
        return None
    finally:
        book.close()


def _plain_folder(folder: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(str(folder)).st_mode)
    except OSError:
        return False


def _files(folder: Path, seen: Optional[Set[Tuple[int, int]]] = None) -> Iterator[Tuple[Path, int]]:
    """(path, bytes) of each plain file beneath, links not followed; one that has several names counts once."""
    seen = set() if seen is None else seen
    with os.scandir(str(folder)) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path), seen)
                continue
            info = entry.stat(follow_symlinks=False)
            size = info.st_size
            if info.st_nlink > 1:
                key = (info.st_dev, info.st_ino)
                size = 0 if key in seen else size
                seen.add(key)
            yield Path(entry.path), size


def _overlap(left: str, right: str) -> bool:
    """Whether one of both is the other or within it, links resolved."""
    one, two = os.path.realpath(left), os.path.realpath(right)
    return os.path.commonpath([one, two]) in (one, two)


# -- removing ----------------------------------------------------------------------------------------------------------------------


def remove(
    state_dir: str, name: str, incomplete: bool = False, more: Sequence[str] = (), dry: bool = False
) -> Dict[str, Any]:
    """Remove the past run or output folder ``name``: a run's id or an output folder's path, as :func:`known` lists it.

    {name, files, bytes: freed, strangers: files that stay, left: the first of them}.
    HsError, with nothing removed, for whatever must not go. ``incomplete``: also what did not come to its end. ``dry``: only say.
    """
    paths = Paths(state_dir)
    if not paths.state.is_dir():
        raise HsError("no run has ever been begun on this host", UNTOUCHED, "look at hs_state_dir")
    with fsio.mutex(paths.mutex, 30):  # no run begins meanwhile
        found = known(state_dir, more)
        if name.startswith("/"):
            return _remove_output(paths, name, found, incomplete, dry)
        return _remove_run(name, found, incomplete, dry)


def _not_listed(name: str) -> HsError:
    return HsError(
        "{} is not among the runs and output folders of this host".format(name),
        UNTOUCHED,
        "name one in full, as playbooks/clean.yml lists it without hs_clean; an output folder whose runs are gone is listed where "
        "hs_output_dir names it",
    )


def _second_word(what: str) -> HsError:
    return HsError(
        "{} is not complete".format(what), UNTOUCHED, "to remove it all the same give hs_clean_incomplete=true as well"
    )


def _remove_run(name: str, found: Dict[str, Any], incomplete: bool, dry: bool) -> Dict[str, Any]:
    run = next((run for run in found["runs"] if run["run_id"] == name), None)
    if run is None:
        raise _not_listed(name)
    if run["open"]:
        raise HsError("run {} is open".format(name), UNTOUCHED, "let it end, or run playbooks/restore.yml")
    if not run["ours"]:
        raise HsError(
            "{} holds no journal of run {}: it is none of ours, or its run died before it began".format(
                run["path"], name
            ),
            UNTOUCHED,
            "look at it; remove it by hand if it is of no use",
        )
    if not run["complete"] and not incomplete:
        raise _second_word("run {} ({})".format(name, run["outcome"]))
    return _sweep(Path(run["path"]), name, lambda relative: True, "journal.json", dry)


def _remove_output(paths: Paths, name: str, found: Dict[str, Any], incomplete: bool, dry: bool) -> Dict[str, Any]:
    output = next((output for output in found["outputs"] if output["path"] == name), None)
    if output is None:
        raise _not_listed(name)
    folder = Path(name)
    if folder.is_symlink():
        raise HsError("{} is a link".format(name), UNTOUCHED, "name the folder that it points to, if that is listed")
    _forbid(paths, folder)
    if output["in_use"]:
        raise HsError(
            "the open run {1} works with {0}".format(name, found["open"]),
            UNTOUCHED,
            "let the run end, or run playbooks/restore.yml",
        )
    if not output["ours"]:
        raise HsError("{} has no book of an extraction in it ({})".format(name, FILE), UNTOUCHED, "remove it by hand")
    if not output["complete"] and not incomplete:
        raise _second_word("{} ({} of {} samples)".format(name, output["samples"], output["total"]))

    def of_ours(relative: str) -> bool:
        place, _, file = relative.rpartition("/")
        return place in OURS and re.fullmatch(OURS[place], file) is not None

    lock = _lock(folder)
    try:
        return _sweep(folder, name, of_ours, FILE, dry)
    finally:
        if lock >= 0:
            os.close(lock)


def _forbid(paths: Paths, folder: Path) -> None:
    """HsError for the root, a mount's root, and whatever holds this project's own state."""
    _forbid_mounts(folder)
    if _overlap(str(folder), str(paths.state)):
        raise HsError("{} and the state folder are not apart".format(folder), UNTOUCHED, "remove it by hand")


def _forbid_mounts(folder: Path) -> None:
    """HsError where ``folder`` is the root of a file system, or one is mounted within it (a bind mount too)."""
    real = os.path.realpath(str(folder))
    if real == "/" or os.path.ismount(real):
        raise HsError("{} is the root of a file system".format(folder), UNTOUCHED, "remove what is in it by hand")
    for point in mount_points():
        if point == real or point.startswith(real + "/"):
            raise HsError("a file system is mounted on {}".format(point), UNTOUCHED, "unmount it first")


def mount_points(table: Path = Path("/proc/self/mountinfo")) -> List[str]:
    """Where file systems are mounted, as this process sees them."""
    fields = [line.split(" ") for line in table.read_text(errors="surrogateescape").splitlines()]
    return [re.sub(r"\\(\d{3})", lambda octal: chr(int(octal.group(1), 8)), field[4]) for field in fields]


def _lock(folder: Path) -> int:
    """The output folder's lock, as its client holds it; -1 where there is none to take. HsError where somebody has it."""
    try:
        fd = os.open(str(folder / ".lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return -1
        raise
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise HsError("somebody works in {}: its lock is held".format(folder), UNTOUCHED, "wait for them") from None
    return fd


def _sweep(folder: Path, name: str, goes: Callable[[str], bool], last: str, dry: bool) -> Dict[str, Any]:
    """Remove the files beneath ``folder`` that ``goes`` (by their relative path), then what folders are empty; ``last``: the file that goes last.

    With it gone the folder is no one's any more: a removal that was broken off can be done again. A link is removed where a file of that name
    would be; what it points to is not looked at.
    """
    _forbid_mounts(folder)
    freed = files = strangers = 0
    left: List[str] = []
    named: Dict[Tuple[int, int], int] = {}  # of a file with several names: how many are still there
    at_last: List[Path] = []
    for place, folders, names in os.walk(str(folder), topdown=False, followlinks=False):
        relative = os.path.relpath(place, str(folder))
        prefix = "" if relative == "." else relative + "/"
        # a link to a folder is listed among the folders
        for entry in names + [entry for entry in folders if os.path.islink(os.path.join(place, entry))]:
            path = Path(place) / entry
            if not goes(prefix + entry):
                strangers += 1
                left += [prefix + entry] if len(left) < 20 else []
                continue
            info = os.lstat(str(path))
            key = (info.st_dev, info.st_ino)
            named[key] = named.get(key, info.st_nlink) - 1
            # the last name of a file frees it
            if not named[key]:
                freed += info.st_size
                del named[key]
            files += 1
            if prefix + entry == last:
                at_last.append(path)
            elif not dry:
                os.unlink(str(path))
        if not dry and prefix:
            _rmdir(place)
    for path in at_last if not dry else []:
        os.unlink(str(path))
    if not dry:
        _rmdir(str(folder))
    return {"name": name, "files": files, "bytes": freed, "strangers": strangers, "left": sorted(left)}


def _rmdir(place: str) -> None:
    try:
        os.rmdir(place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


# -- for people --------------------------------------------------------------------------------------------------------------------


def size_text(size: int) -> str:
    """GB (10^9 bytes), or MB below one."""
    return "{:.1f} GB".format(size / 1e9) if size >= 1e9 else "{:.1f} MB".format(size / 1e6)


def lines(found: Dict[str, Any]) -> List[str]:
    """What :func:`known` found."""
    said = []
    for run in found["runs"]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["opened"])) if run["opened"] else "an unknown time"
        text = "run {}: {}, begun {}, {}".format(run["run_id"], run["outcome"], when, size_text(run["bytes"]))
        said.append(text + (", into {}".format(run["output"]) if run["output"] else ""))
    for output in found["outputs"]:
        if not output["ours"]:
            said.append("output {}: no book of an extraction in it; never removed".format(output["path"]))
            continue
        said.append(
            "output {}: {} of {} samples, {}, {}{}".format(
                output["path"],
                output["samples"],
                output["total"],
                "complete" if output["complete"] else "not complete",
                size_text(output["bytes"]),
                "".join("; {} of them are at {}".format(count, root) for root, count in sorted(output["moved"].items()))
                + (", in use by the open run" if output["in_use"] else ""),
            )
        )
    return said or ["no run has ever been begun on this host"]


def removed_lines(done: Dict[str, Any], dry: bool) -> List[str]:
    """What :func:`remove` did."""
    told = "{} {}: {} files, {}".format(
        "would remove" if dry else "removed", done["name"], done["files"], size_text(done["bytes"])
    )
    said = [told + (" would be free" if dry else " freed")]
    if done["strangers"]:
        more = ", ..." if done["strangers"] > len(done["left"]) else ""
        said.append(
            "{} files that are none of ours stay: {}{}".format(done["strangers"], ", ".join(done["left"]), more)
        )
    return said
