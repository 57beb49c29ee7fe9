"""What a run was, as one JSON document: gathered on the target, kept beside the output, read by whoever makes a page of it.

The document is OUTPUT/runs/RUN_ID.json, where the output folder is one (a book of ours is in it): it describes these samples and goes
where they go, while the state folder's logs may be cleared away. A run that came to no output folder keeps it in its own folder,
STATE/runs/RUN_ID/report.json. docs/report.md has the layout; ``schema_version`` rises when a reader of the old one would be wrong.

Gathering reads only, needs no run to be open, and must work on whatever a run left: a missing file is a missing number, never an error.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from . import figures, formats, fsio, secrets
from .errors import HsError
from .journal import Journal, Paths, closed_runs
from .manifest import BAD, FAILED, FILE, Manifest

SCHEMA = 1
FOLDER = "runs"  # in the output folder
SHOWN = 40  # rows of the list of what failed
REASONS = 20  # kinds of reasons that are counted apart
TEXT = 400  # characters of a reason
ENGINE_KEYS = ("release", "package", "executable", "python", "layout", "helper_sha256", "server")
MODEL_KEYS = ("path", "architecture", "dtype", "hidden_size", "num_layers", "vocab_size", "fingerprint", "sha256")
_SHORTEST_SECRET = 6  # shorter values are words of everyday, which would hide half the document


class Found(NamedTuple):
    """Where a run's traces lie. ``journal``: its document, {} where it is gone. ``output``: the folder, None where there is none of ours."""

    run_id: str
    journal: Dict[str, Any]
    output: Optional[Path]


def ours(folder: Path) -> bool:
    """Whether an extraction's book is in ``folder``."""
    return (folder / FILE).is_file() and not (folder / FILE).is_symlink()


def find(state_dir: str, run_id: str = "", output_dir: str = "") -> Found:
    """The run ``run_id``, or the last one of this host, or the last one that ``output_dir`` knows; HsError where there is none."""
    paths = Paths(state_dir)
    journals = closed_runs(paths)
    opened = Journal.load(paths) if paths.state.is_dir() else None
    journals += [opened.document] if opened is not None else []
    fitting = [document for document in journals if not run_id or document["run_id"] == run_id]
    if fitting:
        document = max(fitting, key=lambda document: float(document["opened"]))
        return Found(document["run_id"], document, _output(document, output_dir))
    folder = Path(output_dir or "/nonexistent")
    if ours(folder):
        kept = [document["run"]["id"] for document in others(folder)]
        made_by = (fsio.read_json(folder / "manifest.json") or {}).get("run_id") or ""
        known = kept + [made_by] if made_by else kept
        if run_id in known or (not run_id and known):
            return Found(run_id or (kept or [made_by])[-1], {}, folder)
    raise HsError(
        "no run {} is known on this host".format(run_id) if run_id else "no run is known on this host",
        "everything: it was only looked",
        "runs are listed by playbooks/clean.yml; an output folder elsewhere is named by hs_output_dir",
    )


def _output(journal: Mapping[str, Any], output_dir: str) -> Optional[Path]:
    """The folder with the output of a run whose journal is there: where it was written, or where it was moved since (``output_dir``).

    The one that keeps the run's document is it. Else its place in the journal, unless that was emptied since and holds another extraction.
    """
    named = (journal["settings"].get("output_dir"), output_dir)
    folders = [folder for folder in (Path(name) for name in named if name) if ours(folder)]
    for folder in folders:
        if (folder / FOLDER / (journal["run_id"] + ".json")).is_file():
            return folder
    ended = float((journal.get("closed") or {}).get("at") or time.time())
    return next((folder for folder in folders if _begun(folder) <= ended), None)


def _begun(output: Path) -> float:
    """When an output folder got its first run, in seconds since 1970; 0 where its book does not tell."""
    try:
        book = Manifest(output, read_only=True)
    except HsError:
        return 0
    try:
        return float(book.get("begun") or 0)
    except sqlite3.Error:
        return 0
    finally:
        book.close()


def others(output: Path) -> List[Dict[str, Any]]:
    """The documents that are kept in an output folder, oldest first; what is none of ours is passed over."""
    folder = output / FOLDER
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            document = fsio.read_json(path)
        except (HsError, OSError, UnicodeDecodeError):
            continue
        if isinstance(document, dict) and isinstance(document.get("run"), dict) and "schema_version" in document:
            found.append(document)
    return sorted(found, key=lambda document: document["run"].get("opened") or 0)


def place(state_dir: str, found: Found) -> Path:
    """Where the document of a run is kept."""
    if found.output is not None:
        return found.output / FOLDER / (found.run_id + ".json")
    return Paths(state_dir).run(found.run_id) / "report.json"


def kept(state_dir: str, found: Found) -> Optional[Dict[str, Any]]:
    """The document as it was made when the run ended, None where there is none or the run was still open then."""
    for path in (place(state_dir, found), Paths(state_dir).run(found.run_id) / "report.json"):
        document = fsio.read_json(path)
        if isinstance(document, dict) and (document.get("run") or {}).get("closed"):
            return document
    return None


def keep(state_dir: str, found: Found, document: Dict[str, Any]) -> Path:
    """Put it in its place, whole or not at all; its path."""
    path = place(state_dir, found)
    path.parent.mkdir(mode=0o755, exist_ok=True)
    if path.parent.is_symlink():
        raise HsError("{} is a link: the report's document is not written through it".format(path.parent))
    fsio.write_json(path, document, 0o644)
    return path


def gather(
    state_dir: str,
    found: Found,
    failure: Optional[Mapping[str, Any]] = None,
    command: Optional[Mapping[str, Any]] = None,
) -> Dict[str, Any]:
    """The document of a run. ``failure``: {task, msg, cut} as the playbook saw it; ``command``: {argv, cwd, inventory} of the playbook."""
    paths = Paths(state_dir)
    folder = paths.run(found.run_id)
    journal, output = found.journal, found.output
    settings: Dict[str, Any] = journal.get("settings") or {}
    result = _json(folder / "result.json")
    manifest = _json(output / "manifest.json") if output is not None else {}
    if not journal and manifest.get("run_id") != found.run_id:
        manifest = dict(manifest, canary={})  # another run's
    spec = _json(folder / "client.spec.json")
    record = _json(paths.production)
    if record.get("run_id") != found.run_id:
        record = {}
    now = time.time()
    opened = journal.get("opened")
    closed = (journal.get("closed") or {}).get("at")
    book = _book(output, opened or 0, closed or now) if output is not None else {}
    made_by = manifest.get("provenance") or spec.get("provenance") or {}
    run = _outcome(found.run_id, journal, result, failure, book, manifest)
    document: Dict[str, Any] = {
        "schema_version": SCHEMA,
        "written": now,
        "utc_offset_s": time.localtime(opened or now).tm_gmtoff,
        "run": run,
        "host": {
            "name": os.uname().nodename,
            "state_dir": state_dir,
            "run_dir": str(folder) if folder.is_dir() else None,
        },
        "operator": journal.get("operator") or made_by.get("operator"),
        "model": _keys(
            dict(
                settings.get("model") or made_by.get("model") or {},
                **_pick(manifest.get("model"), "fingerprint", "sha256"),
            ),
            *MODEL_KEYS,
        ),
        "dataset": {
            "path": settings.get("dataset") or (manifest.get("dataset") or {}).get("path"),
            "sha256": (book.get("identity") or {}).get("dataset_sha256"),
            "cut_to": settings.get("cut_to"),
        },
        "output": {"path": str(output) if output else settings.get("output_dir"), "there": output is not None},
        "samples": book.get("counts"),
        "this_run": dict(
            _keys(book.get("this_run"), "samples", "tokens", "bytes", "retried"),
            client_seconds=result.get("seconds"),
            forwards=(result.get("counts") or {}).get("forwards"),
        ),
        "size": _size((book.get("counts") or {}).get("bytes_done")),
        "production": _production(journal, record),
        "timeline": timeline(journal, folder / "history.jsonl", run["outcome"]),
        "throughput": figures.curve(folder / "history.jsonl"),
        "lengths": book.get("lengths") or {"count": 0, "bins": []},
        "norms": book.get("norms") or [],
        "canary": canary(result.get("canary") or manifest.get("canary") or {}, manifest, result.get("outcome")),
        "errors": book.get("errors") or {"total": 0, "reasons": [], "rows": []},
        "disk": _disk(folder / "history.jsonl", output or Path(settings.get("output_dir") or "/nonexistent"), settings),
        "moving": _moving(result, book, settings),
        "commands": _commands(settings, journal.get("view") or {}, made_by, paths, folder, command),
        "formats": settings.get("formats") or [],
        "provenance": {
            "engine": _keys(
                dict(
                    made_by.get("engine") or settings.get("engine") or {}, **_pick(manifest.get("engine"), *ENGINE_KEYS)
                ),
                *ENGINE_KEYS,
            ),
            "engine_file": _keys(made_by.get("engine_file"), "path", "state", "sha256", "sha256_pristine", "variant"),
            "way_in": made_by.get("way_in"),
            "tensor_parallel": made_by.get("tensor_parallel") or settings.get("tensor_parallel"),
            "boundaries": settings.get("boundaries") or manifest.get("boundaries") or [],
            "slots": manifest.get("slots") or [],
            "final": settings.get("final") or manifest.get("final"),
            "dtype": manifest.get("dtype") or (settings.get("model") or {}).get("dtype"),
            "layout": manifest.get("layout") or {},
        },
        "earlier": [_short(document) for document in others(output) if document["run"].get("id") != found.run_id]
        if output
        else [],
    }
    return scrub(document, [*_secret_values(record), *_secret_values({"env": settings.get("extraction_env") or {}})])


# -- the parts -------------------------------------------------------------------------------------------------------------------


def _json(path: Path) -> Dict[str, Any]:
    """The object in ``path``, {} where there is none or it is broken: a report tells of the rest all the same."""
    try:
        found = fsio.read_json(path)
    except (HsError, OSError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _pick(source: Any, *names: str) -> Dict[str, Any]:
    return {name: source[name] for name in names if isinstance(source, dict) and name in source}


def _keys(source: Any, *names: str) -> Dict[str, Any]:
    """These keys and no others, None where there is no such value: a reader finds each of them in every document."""
    return {name: (source or {}).get(name) for name in names}


def _size(size: Any) -> Optional[Dict[str, float]]:
    """bytes, GB (10^9) and GiB (2^30)."""
    return None if size is None else {"bytes": size, "GB": round(size / 1e9, 3), "GiB": round(size / 2**30, 3)}


def _short(document: Mapping[str, Any]) -> Dict[str, Any]:
    run = document["run"]
    return dict(
        _pick(run, "id", "opened", "closed", "outcome", "headline"),
        **_pick(document.get("this_run"), "samples", "tokens", "bytes"),
    )


def _outcome(
    run_id: str,
    journal: Mapping[str, Any],
    result: Mapping[str, Any],
    failure: Optional[Mapping[str, Any]],
    book: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> Dict[str, Any]:
    """How the run ended. outcome: complete, window, stopped, canary_refused, error_budget, failed, or open where it did not end."""
    end = journal.get("closed") or {}
    steps = journal.get("steps") or []
    opened = journal.get("opened")
    last_failed = next(
        (step for step in reversed(steps) if step["state"] == "failed" and not step["step"].startswith("restore")), None
    )
    outcome, message = result.get("outcome"), result.get("message")
    if not journal:
        counts = book.get("counts") or {}
        outcome, message = "unknown", "the run's journal is gone; this is what the output folder tells"
        if counts and not counts["pending"] and manifest.get("run_id") == run_id:
            outcome, message = "complete", "{} of {} samples are there".format(counts["done"], counts["total"])
    elif not end and not failure:
        outcome, message = "open", "the run is still open"
    elif failure:
        # a step that met the guard's restore fails for that restore's sake
        cut = failure.get("cut") or (outcome is None and "the window closed" in str(end.get("why") or ""))
        if outcome in (None, "complete") or cut:
            outcome = "window" if cut else "failed"
        message = str(failure.get("msg") or message)
    elif outcome is None:
        why = str(end.get("why") or "")
        outcome = "window" if "the window closed" in why else "failed"
        forward = [step["step"] for step in steps if not step["step"].startswith("restore")]
        message = "ended at {}: {}".format(forward[-1] if forward else "its beginning", why)
        if last_failed:
            message = "{}: {}".format(last_failed["step"], last_failed["detail"])
    return {
        "id": run_id,
        "outcome": outcome,
        "headline": message,
        "left": result.get("left") or None,
        "failed_task": (failure or {}).get("task"),
        "failed_step": last_failed["step"] if last_failed else None,
        "opened": opened,
        "closed": end.get("at"),
        "ended_by": end.get("why"),
        "duration_s": round((end.get("at") or steps[-1]["at"]) - opened, 1) if opened and steps else None,
        "window_s": (journal.get("settings") or {}).get("window_s"),
        "deadline": journal.get("deadline"),
    }


def _production(journal: Mapping[str, Any], record: Mapping[str, Any]) -> Dict[str, Any]:
    """How production fared. down_from, down_to: unix times; None where it was not taken away, or did not come back."""
    steps = journal.get("steps") or []
    expected = record.get("expected") or (journal.get("settings") or {}).get("production_expected")
    begun = next((step["at"] for step in steps if (step["step"], step["state"]) == ("stop", "begun")), None)
    answers = journal.get("answers") or {}
    back = answers.get("at") or next(
        (
            step["at"]
            for step in reversed(steps)
            if (step["step"], step["state"]) == ("restore: check production", "done")
        ),
        None,
    )
    if expected == "stopped":
        begun = back = None
    return {
        "expected": expected,
        "how": (journal.get("view") or {}).get("production"),
        "down_from": begun,
        "down_to": back if begun is not None else None,
        "down_s": round(back - begun, 1) if begun is not None and back is not None else None,
        "decode_before": answers.get("decode_before") or record.get("decode_rate"),
        "decode_after": answers.get("decode_after"),
    }


def timeline(journal: Mapping[str, Any], history: Path, outcome: str = "") -> List[Dict[str, Any]]:
    """Each step once: {step, depth, begin, end, state, detail}, by its beginning; end None where it never came. Times are unix times.

    state: begun, done, failed, or cut for the step that the window ended (``outcome``), which is no failure.
    """
    found: List[Dict[str, Any]] = []
    if not journal:
        return found
    at_work: Dict[str, Dict[str, Any]] = {}
    for record in journal.get("steps") or []:
        name, state = record["step"], record["state"]
        if state == "begun":
            depth = 1 if name.startswith("restore: ") else 0
            step = {
                "step": name,
                "depth": depth,
                "begin": record["at"],
                "end": None,
                "state": state,
                "detail": record["detail"],
            }
            at_work[name] = step
            found.append(step)
        elif name in at_work:
            at_work.pop(name).update(end=record["at"], state=state, detail=record["detail"])
        elif name == "begin" and not any(step["step"] == name for step in found):
            found.append(
                {
                    "step": name,
                    "depth": 0,
                    "begin": journal["opened"],
                    "end": record["at"],
                    "state": state,
                    "detail": record["detail"],
                }
            )
        else:  # a second controller that goes on with the run, or a step that was there already
            found.append(
                {
                    "step": name,
                    "depth": 0,
                    "begin": record["at"],
                    "end": record["at"],
                    "state": state,
                    "detail": record["detail"],
                }
            )
    for step in found if outcome in ("window", "stopped") else []:
        if step["state"] == "failed" and not step["step"].startswith("restore"):
            step["state"] = "cut"
    for phase, begin, end in _phases(history):
        if phase in ("canary", "extract", "finish"):
            named = {"canary": "extract: canary", "extract": "extract: data set", "finish": "extract: description"}[
                phase
            ]
            found.append({"step": named, "depth": 1, "begin": begin, "end": end, "state": "done", "detail": ""})
    # what encloses comes before what it encloses
    return sorted(found, key=lambda step: (step["begin"], step["depth"]))


def _phases(history: Path) -> List[Tuple[str, float, float]]:
    """(phase, first seen, last seen or the next one's beginning) of the client."""
    found: List[Tuple[str, float, float]] = []
    for line in figures.history(history):
        at, phase = float(line["at"]), str(line.get("phase"))
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], at)
            continue
        if found:
            found[-1] = (found[-1][0], found[-1][1], at)
        found.append((phase, at, at))
    return found


def states_of(identity: Mapping[str, Any]) -> List[str]:
    """The names of a sample's states in the order of its norms."""
    final = str(identity.get("final"))
    names = ["boundary {}".format(boundary) for boundary in identity.get("boundaries") or []]
    return names + ["final, {}".format(name.replace("_", "-")) for name in formats.kept(final)]


def _book(output: Path, begin: float, end: float) -> Dict[str, Any]:
    """What the output folder's book tells; {} where it cannot be read."""
    try:
        book = Manifest(output, read_only=True)
    except (HsError, sqlite3.Error):
        return {}
    try:
        identity = book.identity()
        return {
            "identity": identity,
            "counts": book.counts(),
            "moved": book.moved_counts(),
            "this_run": book.made_between(begin, end),
            "lengths": figures.lengths(book.lengths()),
            "norms": figures.norms(book.norms(), states_of(identity)) if identity else [],
            "errors": errors(book),
        }
    except sqlite3.Error:
        return {}
    finally:
        book.close()


def errors(book: Manifest) -> Dict[str, Any]:
    """What is not there and why. {total, reasons: [{reason, count, first: rows}], other: count of further kinds, rows: [{idx, state, attempts, reason}]}.

    Reasons that differ only in their numbers are counted as one.
    """
    kinds: Dict[str, Dict[str, Any]] = {}
    rows: List[Dict[str, Any]] = []
    total = other = 0
    for state in (FAILED, BAD):
        for sample in book.samples(state):
            total += 1
            text = (sample.reason or "no reason was kept")[:TEXT]
            if len(rows) < SHOWN:
                rows.append({"idx": sample.idx, "state": state, "attempts": sample.attempts, "reason": text})
            kind = re.sub(r"\b[0-9a-f]{16,}\b|-?\d+(?:\.\d+)?(?:e[-+]?\d+)?", "#", text)
            known = kinds.get(kind)
            if known is None and len(kinds) >= REASONS:
                other += 1
                continue
            known = kinds.setdefault(kind, {"reason": text, "count": 0, "first": []})
            known["count"] += 1
            if len(known["first"]) < 5:
                known["first"].append(sample.idx)
    reasons = sorted(kinds.values(), key=lambda kind: -int(kind["count"]))
    return {"total": total, "reasons": reasons, "other": other, "rows": rows}


def canary(numbers: Mapping[str, Any], manifest: Mapping[str, Any], outcome: Any = None) -> Dict[str, Any]:
    """The proof. {skipped, refused, sequences, positions, checks: [{check, value, tolerance, unit, holds, note}], rms: [{state, value}]}.

    holds: None where the tolerance is not known (outputs of before it was written down) or nothing was measured.
    """
    empty = {"skipped": bool(numbers.get("skipped")), "refused": outcome == "canary_refused", "checks": [], "rms": []}
    if not numbers or numbers.get("skipped"):
        return empty
    of_states, of_logprobs = numbers.get("state_tolerance") or None, numbers.get("logprob_tolerance") or None
    ranks = int(numbers.get("ranks") or 0)
    checks = [
        ("every tensor-parallel rank has the same states", numbers.get("rank_difference"), of_states, "relative",
         "{} ranks".format(ranks) if ranks > 1 else "one rank: nothing to compare"),
        ("the same prompt twice gives the same states", numbers.get("repeat_difference"), of_states, "relative", ""),
        ("lm_head(norm(final)) gives the server's own log-probabilities", numbers.get("logprob_difference"), of_logprobs, "nats",
         "{} positions".format(numbers.get("positions"))),
    ]  # fmt: skip
    differences = numbers.get("boundary_difference") or {}
    for boundary in sorted(differences, key=int):
        told = "boundary {0}, normed, is what layer {0}'s attention received".format(boundary)
        checks.append((told, differences[boundary], of_states, "relative", ""))
    if numbers.get("together"):
        note = "{} prompts in one forward".format(numbers["together"])
        checks.append(
            (
                "prompts that share a forward are as they are alone",
                numbers.get("together_difference"),
                of_states,
                "relative",
                note,
            )
        )
    said = []
    for told, value, tolerance, unit, note in checks:
        holds = None if value is None or tolerance is None else bool(value <= tolerance)
        said.append({"check": told, "value": value, "tolerance": tolerance, "unit": unit, "holds": holds, "note": note})
    if numbers.get("longest"):
        told = "the longest sample comes out whole"
        holds = outcome != "canary_refused" or None
        said.append(
            {
                "check": told,
                "value": numbers["longest"],
                "tolerance": None,
                "unit": "tokens",
                "holds": holds,
                "note": "",
            }
        )
    rms = [{"state": state, "value": value} for state, value in (numbers.get("rms") or {}).items()]
    return dict(empty, **_pick(numbers, "sequences", "positions", "ranks"), checks=said, rms=rms)


def _disk(history: Path, output: Path, settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Bytes. {output: {free_before, free_after, total}, dump: {path, size, peak, lowest_free}}; None where nobody looked."""
    before: Any = None
    most = lowest = None
    for line in figures.history(history):
        before = line.get("output_free") if before is None else before
        free = line.get("dump_free")
        if isinstance(free, (int, float)):
            most = free if most is None else max(most, free)
            lowest = free if lowest is None else min(lowest, free)
    dump = Path(settings.get("dump_dir") or "/nonexistent")
    return {
        "output": dict(_free(output), free_before=before),
        "dump": {
            "path": str(dump) if settings.get("dump_dir") else None,
            "size": _free(dump).get("total"),
            "peak": most - lowest if most is not None and lowest is not None else None,
            "lowest_free": lowest,
        },
    }


def _moving(
    result: Mapping[str, Any], book: Mapping[str, Any], settings: Mapping[str, Any]
) -> Optional[Dict[str, Any]]:
    """Of samples that moved on: {to, moved, bytes_moved, archives, here, held_s, wrong, error, verified_by}; None where none did and none should."""
    known, told = book.get("moved") or {}, result.get("moving") or {}
    to = settings.get("move_to") or next(iter(known.get("roots") or {}), None)
    if not to:
        return None
    moved = known.get("moved", 0)
    found = {"to": to, "here": (book.get("counts") or {}).get("done", 0) - moved}
    found.update(_keys(known, "moved", "bytes_moved", "archives"))
    return dict(found, **_keys(told, "held_s", "wrong", "error", "verified_by"))


def _free(path: Path) -> Dict[str, Optional[int]]:
    """Of the file system that ``path`` is on, or would be."""
    while not path.exists() and path != path.parent:
        path = path.parent
    try:
        found = os.statvfs(str(path))
    except OSError:
        return {"free_after": None, "total": None}
    return {"free_after": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}


def _commands(
    settings: Mapping[str, Any],
    view: Mapping[str, Any],
    made_by: Mapping[str, Any],
    paths: Paths,
    folder: Path,
    command: Optional[Mapping[str, Any]],
) -> Dict[str, Any]:
    """argv and environment of each program, with secret values hidden. environment: what was set beyond production's own."""
    launch = made_by.get("launch") or {}
    server = settings.get("command") or launch.get("argv") or []
    client: List[str] = []
    if settings.get("engine_python"):
        client = [
            settings["engine_python"],
            "-m",
            "sglang_hs_client",
            "run",
            "--spec",
            str(folder / "client.spec.json"),
        ]
    played = dict(command or {})
    return {
        "server": {
            "argv": secrets.command_line(server),
            "environment": secrets.environment(view.get("environment") or launch.get("environment") or {}),
            "cwd": view.get("cwd"),
        },
        "client": {
            "argv": client,
            "environment": {"PYTHONPATH": str(paths.lib), "CUDA_VISIBLE_DEVICES": ""} if client else {},
        },
        "production": {"argv": secrets.command_line(view.get("production_command") or [])},
        "playbook": {
            "argv": list(played.get("argv") or []),
            "cwd": played.get("cwd"),
            "inventory": list(played.get("inventory") or []),
        },
    }


# -- secrets ---------------------------------------------------------------------------------------------------------------------


def _secret_values(record: Mapping[str, Any]) -> List[str]:
    """Every secret that a record of production holds: its key, what its command line and environment hide."""
    argv = [str(word) for word in record.get("argv") or []]
    env = {str(name): str(value) for name, value in (record.get("env") or {}).items()}
    found = [str(record.get("api_key") or "")]
    for word, shown in zip(argv, secrets.command_line(argv)):
        if word != shown:
            found.append(word.partition("=")[2] if word.startswith("--") else word)
    found += [
        value for name, value in secrets.environment(env).items() if value == secrets.HIDDEN for value in [env[name]]
    ]
    return [value for value in found if len(value) >= _SHORTEST_SECRET]


def scrub(document: Any, values: Iterable[str]) -> Any:
    """The same with each of ``values`` hidden wherever it stands in a text: a message may quote a command line or an answer."""
    hidden: Sequence[str] = sorted(set(values), key=len, reverse=True)

    def clean(part: Any) -> Any:
        if isinstance(part, str):
            for value in hidden:
                part = part.replace(value, secrets.HIDDEN)
            return part
        if isinstance(part, dict):
            return {key: clean(value) for key, value in part.items()}
        if isinstance(part, (list, tuple)):
            return [clean(value) for value in part]
        return part

    return clean(document)
