"""What a run would take: samples to do, bytes, room on the disk and in memory. Reads only."""

from __future__ import annotations

import importlib.util
import math
import os
import sqlite3
from pathlib import Path
from typing import Any, Dict, List, Mapping

from . import dataset, fsio
from .errors import HsError
from .journal import Paths
from .manifest import FILE, SAMPLES, Manifest
from .movesettings import NONE, HighWater
from .share import Share

UNTOUCHED = "everything: production was not touched"
DESCRIBED = 25  # bytes a token in samples.jsonl and the arrow data set: its id twice and its mask twice
BOOKED = 1000  # bytes a sample in the book and its index
MOVERS = 16  # dumps that the client verifies and moves beside the prompts in flight, at most


def size(count: float) -> str:
    """Bytes as disks are sold and as tools print them."""
    if count < 1e8:
        return "{:.1f} MB ({:.1f} MiB)".format(count / 1e6, count / 2**20)
    return "{:,.1f} GB ({:,.1f} GiB)".format(count / 1e9, count / 2**30)


def token_bytes(settings: Mapping[str, Any]) -> int:
    """Bytes of one token's states: each boundary and the final state (twice where both of it are kept), and its id."""
    states = len(settings["boundaries"]) + (2 if settings["final"] == "both" else 1)
    return states * int(settings["model"]["hidden_size"]) * int(settings["model"]["itemsize"]) + 8


def look(settings: Mapping[str, Any], skip_bad_rows: bool, reserve: float, share: str = "") -> Dict[str, Any]:
    """Samples, tokens, what is left to do, and whether it fits. ``reserve``: bytes of disk to leave free. Raises HsError.

    ``share``: the host's part of the data set, packed; the data set is then not read.
    """
    counts = True  # whether anybody will read what this host has
    if share:
        part = Share.unpack(share)
        found = _of_share(settings, part)
        counts = part.owned > 0
    else:
        found = dataset.scan(
            settings["dataset"], settings["model"]["vocab_size"], settings["max_prompt"], settings["cut_to"]
        )
    if found.bad_total and not skip_bad_rows:
        more = "; and {} more".format(found.bad_total - 5) if found.bad_total > 5 else ""
        raise HsError(
            "{} of {} rows of {} are no valid samples: {}{}".format(
                found.bad_total,
                found.samples + found.bad_total,
                settings["dataset"],
                "; ".join(str(bad) for bad in found.bad[:5]),
                more,
            ),
            UNTOUCHED,
            "mend the data set, or set hs_skip_bad_rows=true to go without these rows (hs_cut_to cuts long ones)",
        )
    if not found.samples and not share:
        raise HsError(
            "no row of {} is a valid sample: {}".format(settings["dataset"], found.bad[0]),
            UNTOUCHED,
            "mend the data set",
        )
    done = _done(settings, found.sha256)
    left = max(found.tokens - done["tokens"], 0)
    each = token_bytes(settings)
    work = done["samples"] < found.samples
    undescribed = counts and not work and not _described(Path(settings["output_dir"]))
    work = work or undescribed
    answer: Dict[str, Any] = dict(found.facts(), done=done["samples"], left_tokens=left, bytes=left * each, work=work)
    answer.update(done_tokens=done["tokens"], done_bytes=done["bytes"])
    answer["line"] = "{:,} samples, {:,} tokens ({} to {} each){}{}".format(
        found.samples,
        found.tokens,
        found.min_length,
        found.max_length,
        ", {:,} cut to {}".format(found.cut, settings["cut_to"]) if found.cut else "",
        ", {:,} rows left out".format(found.bad_total) if found.bad_total else "",
    )
    if done["samples"]:
        answer["line"] += "; {:,} are done".format(done["samples"])
    if undescribed:
        answer["line"] += ", but the client was ended before it wrote {} and manifest.json beside them".format(SAMPLES)
    # this is the engine's Python, which the client will run in
    answer["arrow"] = importlib.util.find_spec("pyarrow") is not None
    answer["time_line"] = _expected(settings, left)
    answer["lengths"] = histogram(found.hist)
    answer["space_line"] = _room(settings, found, left, each, reserve, done["waiting_bytes"]) if work else "complete"
    waiting = done["samples"] - done["moved"]
    if settings.get("move_to") and not work and waiting:
        answer["space_line"] += "; {:,} samples are still to be moved: playbooks/move.yml".format(waiting)
    return answer


def _of_share(settings: Mapping[str, Any], share: Share) -> dataset.Scan:
    """The same numbers of a part whose rows were checked when the data set was divided."""
    found = dataset.Scan(settings["dataset"], sha256=share.sha256)
    for length in share.lengths:
        dataset.count(found, length, length, False)
    if found.max_length > settings["max_prompt"]:
        raise HsError(
            "a sample of this host's share has {} tokens, its server takes {}".format(
                found.max_length, settings["max_prompt"]
            ),
            UNTOUCHED,
            "give the hosts the same context length, or cut the data set (hs_cut_to)",
        )
    return found


def histogram(hist: Mapping[int, int]) -> List[str]:
    """Lines of a picture: upper edge in tokens (above the line before), samples, share."""
    total, most = max(sum(hist.values()), 1), max(list(hist.values()) or [1])
    return [
        "{:>9,} tokens  {:>9,}  {:>5.1%}  {}".format(
            edge, hist[edge], hist[edge] / total, "#" * max(round(40 * hist[edge] / most), 1)
        )
        for edge in sorted(hist)
    ]


def _expected(settings: Mapping[str, Any], left: int) -> str:
    """One line on the time for ``left`` tokens, from what earlier runs on this host took; before the first nobody knows."""
    for folder in sorted(Paths(settings["state_dir"]).runs.glob("*"), reverse=True):
        try:
            result = fsio.read_json(folder / "result.json") or {}
            closed = fsio.read_json(folder / "journal.json") or {}
        except (HsError, OSError):
            continue
        times = {(step["step"], step["state"]): step["at"] for step in closed.get("steps", [])}
        # of that run alone: what it found done already took it no time
        tokens, took = result.get("tokens_this_run"), result.get("seconds")
        if result.get("outcome") == "complete" and tokens and took and ("restore", "done") in times:
            around = times[("restore", "done")] - closed["opened"] - took
            work, window = left * took / tokens, float(settings["window_s"])
            # each window loads both servers anew, and leaves time for production to load before its end
            room = window - 1.25 * around
            count = math.ceil(work / max(room, 1.0))
            told = "about {} with production down for all but the first seconds ({:,.0f} tokens/s and {} of loading in run {})"
            said = told.format(duration(count * around + work), tokens / took, duration(around), folder.name)
            if count > 1 and room < window / 4:
                told = "a window of {} leaves {} for it beside the loading: give it a longer one (hs_window)"
                return "{} of work; {}".format(
                    duration(work), told.format(settings["window"], duration(max(room, 0.0)))
                )
            return said + ("; {} windows of {}".format(count, settings["window"]) if count > 1 else "")
    return "not known before the first complete run on this host"


def duration(seconds: float) -> str:
    """A length of time as people say it."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return "{} h {} min".format(hours, minutes)
    return "{} min {} s".format(minutes, rest) if minutes else "{} s".format(rest)


def _done(settings: Mapping[str, Any], sha256: str) -> Dict[str, int]:
    """What an earlier run left in the output folder: counted where the file is there in its size. Refuses another run's folder."""
    output = Path(settings["output_dir"])
    nothing = {"samples": 0, "tokens": 0, "bytes": 0, "moved": 0, "waiting_bytes": 0}
    if not (output / FILE).is_file():
        if output.is_dir() and any(output.iterdir()):
            strangers = sorted(entry.name for entry in output.iterdir())[:3]
            raise HsError(
                "hs_output_dir {} holds files that are not ours: {}".format(output, ", ".join(strangers)),
                UNTOUCHED,
                "set hs_output_dir to a folder of its own",
            )
        return nothing
    try:
        book = Manifest(output, read_only=True)
    except sqlite3.Error as error:
        raise HsError(
            "{} cannot be read: {}".format(output / FILE, error), UNTOUCHED, "is its disk full or read-only?"
        ) from error
    try:
        known = book.identity()
        mine = {
            "dataset_sha256": sha256,
            "cut_to": settings["cut_to"],
            "hidden_size": settings["model"]["hidden_size"],
            "boundaries": list(settings["boundaries"]),
            "final": settings["final"],
        }
        other = [key for key in sorted(mine) if known and known.get(key) != mine[key]]
        if other:
            told = "; ".join(
                "{}: the folder has {}, this run {}".format(key, known.get(key), mine[key]) for key in other
            )
            raise HsError(
                "the output folder {} belongs to another extraction ({})".format(output, told),
                UNTOUCHED,
                "choose another hs_output_dir, or run with what this one was made with",
            )
        return _found(output, book)
    finally:
        book.close()


def _found(output: Path, book: Manifest) -> Dict[str, int]:
    """What is there of a book's finished samples: a look at each file's size, a million of them in a second or two."""
    samples = moved = tokens = bytes_there = bytes_moved = 0
    folder = os.open(str(output), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for _, file, size_then, _, length in book.done_files():
            if file is None:  # a sample that was moved: its file is at the remote, where its bytes were verified
                moved += 1
                bytes_moved += size_then or 0
            else:
                try:
                    if os.stat(file, dir_fd=folder).st_size != size_then:
                        continue
                except OSError:
                    continue
                bytes_there += size_then
            samples += 1
            tokens += length
    finally:
        os.close(folder)
    return {
        "samples": samples,
        "tokens": tokens,
        "bytes": bytes_there + bytes_moved,
        "moved": moved,
        "waiting_bytes": bytes_there,
    }


def _described(output: Path) -> bool:
    """Whether the client came to its end there: a folder with every sample and no word on what they are is not finished."""
    try:
        document = fsio.read_json(output / "manifest.json") or {}
    except (HsError, OSError):
        return False
    over = "samples" in document and (document.get("counts") or {}).get("pending") == 0
    return over and (output / SAMPLES).is_file()


def _room(settings: Mapping[str, Any], found: dataset.Scan, left: int, each: int, reserve: float, waiting: int) -> str:
    """One line on the room there is; HsError with the numbers where it is too little. ``waiting``: bytes of samples that are here already."""
    output, dumps = _existing(settings["output_dir"]), _existing(settings["dump_dir"])
    for name, place, wanted in (("hs_output_dir", output, settings["output_dir"]),):
        if not os.access(str(place), os.W_OK | os.X_OK):
            raise HsError(
                "{} {} cannot be written (by this user, on this mount)".format(name, wanted),
                UNTOUCHED,
                "choose another folder, or mend its owner or mount",
            )
    need = left * each
    free = _free(output)
    peak = _dump_tokens(settings, found.max_length) * each
    memory = _free(dumps)
    if os.stat(str(output)).st_dev == os.stat(str(dumps)).st_dev:
        need += peak
    if settings.get("move_to"):
        return _room_to_move(settings, found, left * each, each, output, peak, memory, waiting)
    if need + reserve > free:
        raise HsError(
            "the output needs {}, and {} are to stay free, but {} has {}".format(
                size(need), size(reserve), output, size(free)
            ),
            UNTOUCHED,
            "free the disk, choose another hs_output_dir, or lower hs_disk_reserve_gb",
        )
    if peak > memory:
        raise _no_memory(settings, peak, memory)
    return "{} to write, {} free, {} afterwards; dumps up to {}, {} free".format(
        size(need), size(free), size(free - need), size(peak), size(memory)
    )


def _room_to_move(
    settings: Mapping[str, Any],
    found: dataset.Scan,
    need: int,
    each: int,
    output: Path,
    peak: int,
    memory: int,
    waiting: int,
) -> str:
    """The same where samples move on: the disk must hold what is on its way, and what describes it; the remote the rest."""
    info = os.statvfs(str(output))
    free, total = _free(output), info.f_blocks * info.f_frsize
    below = HighWater(settings["move_high_water"]).room(free, total, 0)
    archives = int(settings["archive_gb"] * 1e9) if settings["archive"] != NONE else 0
    # prompts at the server and those on their way, each at its longest; an archive is made beside its samples
    least = _dump_tokens(settings, found.max_length) * each + archives
    texts = found.tokens * DESCRIBED + found.samples * BOOKED
    what, where = "on {}".format(output), settings["move_to"]
    if below < min(least, need) or free < min(least, need) + texts:
        raise HsError(
            "moving needs {} {} below hs_move_high_water ({}) and {} to describe the samples; there are {} below it, {} free in all".format(
                size(min(least, need)), what, settings["move_high_water"], size(texts), size(max(below, 0)), size(free)
            ),
            UNTOUCHED,
            "free the disk, raise hs_move_high_water, lower hs_in_flight{}, or choose another hs_output_dir".format(
                " or hs_archive_gb" if archives else ""
            ),
        )
    far = (settings.get("remote") or {}).get("free")
    if far is not None and far < need + waiting:
        raise HsError(
            "{} are to be moved to {}, which says that {} are free there".format(
                size(need + waiting), where, size(far)
            ),
            UNTOUCHED,
            "make room there, or choose another hs_move_to",
        )
    if peak > memory:
        raise _no_memory(settings, peak, memory)
    kept = min(need, below)
    return (
        "{} to write, all of it to {}{}; at most {} of it lie {} at a time (hs_move_high_water {}: {} of {}, {} free), "
        "{} stay there to describe it; dumps up to {}, {} free"
    ).format(
        size(need), where, " ({} free there)".format(size(far)) if far is not None else "", size(kept), what,
        settings["move_high_water"], size(below), size(total), size(free), size(texts), size(peak), size(memory),
    )  # fmt: skip


def _no_memory(settings: Mapping[str, Any], peak: int, memory: int) -> HsError:
    return HsError(
        "the dumps need up to {} at {}, but only {} are free there".format(
            size(peak), settings["dump_dir"], size(memory)
        ),
        UNTOUCHED,
        "lower hs_in_flight, hs_tokens_per_forward or hs_cut_to, or make that file system larger (mount -o remount,size=...)",
    )


def _dump_tokens(settings: Mapping[str, Any], longest: int) -> int:
    """Most tokens whose dumps lie in memory at once: of the prompts at the server, of those on their way, and of the one being written."""
    tokens = int(settings["tokens_per_forward"])
    if not tokens:
        count = int(settings["in_flight"])
        return (count + min(count, MOVERS) + 1) * longest
    return max(2 * tokens, longest) + (MOVERS + 1) * longest


def _existing(place: str) -> Path:
    """The nearest folder above ``place`` that exists."""
    path = Path(place)
    while not path.exists():
        path = path.parent
    return path


def _free(path: Path) -> int:
    """Bytes free for us on the file system of ``path``."""
    info = os.statvfs(str(path))
    return (info.f_bfree if os.geteuid() == 0 else info.f_bavail) * info.f_frsize
