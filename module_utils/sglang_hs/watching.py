"""How the long steps of a run are doing - the launch, the extraction - as one line for a person and as numbers; writes down how they end."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from . import ending, fsio, loading, procs, restore, server, steps, turns
from .errors import HsError
from .jobs import Job
from .journal import Journal, Paths

FIRST = 60.0  # seconds in which the first sample may be on its way
HANGS = 30.0  # seconds of silence after which a server whose log tells of its failure is not waited for
# Whoever watches a line must see from its beginning how it stands: terminals cut its end.
SEPARATOR = " | "


def progress(state_dir: str, run_id: str, what: str) -> Dict[str, Any]:
    """How ``launch`` or ``extract`` is doing; writes the step's end into the journal when it is over.

    {finished, failed, phase: one word, line, mood: "" or "warn" or "bad", and for an extraction result, progress}.
    """
    paths = Paths(state_dir)
    journal = Journal.load(paths)
    if journal is None or journal.run_id != run_id or journal.restoring:
        # whoever watched was late, and the guard brings production back, or has; a data set that is through is no failure for that
        result = fsio.read_json(paths.run(run_id) / "result.json") or {}
        if what == "extract" and result.get("outcome") == "complete":
            return _through(result, fsio.read_json(paths.run(run_id) / "progress.json") or {})
        journal = turns.forward(paths, run_id)  # says what happened instead
    found = ready(journal) if what == "launch" else extracted(journal)
    if what == "launch" and not found["finished"]:
        late = _late(journal, found["line"])
        if late:
            found.update(finished=True, failed=True, phase="failed", mood="bad", line=late)
    if found["finished"] and journal.last(what) == "begun":
        try:
            with turns.turn(paths):
                turns.forward(paths, run_id).record(what, "failed" if found["failed"] else "done", found["line"][:500])
        except HsError:  # a restore begins this very moment
            if found["failed"] or what != "extract":
                raise
    return found


def _through(result: Mapping[str, Any], progress: Mapping[str, Any]) -> Dict[str, Any]:
    """The answer for an extraction that is complete."""
    return {
        "finished": True,
        "failed": False,
        "phase": "done",
        "mood": "",
        "result": result,
        "progress": progress,
        "line": str(result.get("message", result)),
    }


def _late(journal: Journal, line: str) -> str:
    """Why a launch that is not over need not be waited for any longer; "" while it must be."""
    log = Job("server", journal.folder).log
    cause = ending.failed_while_alive(log)
    with contextlib.suppress(FileNotFoundError):
        # a server that fails is ended by its parent within seconds; one that was denied its port hangs for ever
        if cause and time.time() - log.stat().st_mtime > HANGS:
            return "the extraction server failed and does not end: {}. Its log: {}".format(cause, log)
    timeout = journal.settings["launch_timeout"]
    if time.time() - _begun(journal, "launch") <= float(timeout):
        return ""
    return "not ready after {} s (hs_launch_timeout); it was at: {}{}. Its log: {}".format(
        timeout, line, "; it says: " + cause if cause else "", log
    )


def _begun(journal: Journal, step: str) -> float:
    """Unix time at which ``step`` was last begun; now, where it never was."""
    times = [
        record["at"] for record in journal.document["steps"] if record["step"] == step and record["state"] == "begun"
    ]
    return float(max(times)) if times else time.time()


# -- the launch --------------------------------------------------------------------------------------------------------


def _unattached(journal: Journal) -> str:
    """Why a server that serves has no capture."""
    from . import source_edit  # see steps.engine_file

    if not journal.settings["no_touch"]:
        try:
            file = steps.engine_file(journal.paths, journal.settings)
        except source_edit.EditRefused as error:
            return str(error).replace("\n", "; ")
        if file["state"] != source_edit.PATCHED:
            return "{} is no longer as it was edited in this run ({}); was the package upgraded meanwhile?".format(
                file["path"], file["state"]
            )
    return "the model that it serves is not SGLang's own DeepseekV2Model"


def ready(journal: Journal) -> Dict[str, Any]:
    """Whether the extraction server is. Ready = every rank's helper attached, and real generations."""
    settings = journal.settings
    job = Job("server", journal.folder)
    state = job.state()
    attached = Path(settings["dump_dir"]) / "attached"
    refused = sorted(attached.glob("refused-*.json")) if attached.is_dir() else []
    over = {"finished": True, "failed": True, "phase": "failed", "mood": "bad"}
    if refused:
        reason = (fsio.read_json(refused[0]) or {}).get("reason", "no reason given")
        return dict(over, line="the capture helper refused this server: {}".format(reason))
    if not state["running"]:
        return dict(
            over,
            line="the extraction server ended with status {} while starting: {}. Its log: {}".format(
                state["code"], ending.why_ended(job.log, state["code"]), job.log
            ),
        )
    ranks = sorted(attached.glob("rank*.json")) if attached.is_dir() else []
    url = "http://127.0.0.1:{}".format(settings["extraction_port"])
    if len(ranks) < int(settings["tensor_parallel"]):
        if procs.listeners(int(settings["extraction_port"])) and server.healthy(url, timeout=10) is None:
            line = "the extraction server generates, but the capture is attached on {} of its {} ranks: {}. Its log: {}"
            return dict(over, line=line.format(len(ranks), settings["tensor_parallel"], _unattached(journal), job.log))
        return launching(journal)
    for rank in ranks:
        said = fsio.read_json(rank) or {}
        if [int(boundary) for boundary in said.get("boundaries", [])] != list(settings["boundaries"]) or said.get(
            "final"
        ) != settings["final"]:
            return dict(over, line="{} attached with other boundaries than asked for: {}".format(rank.name, said))
    # asked only when it listens: until then the answer is known, and the log says more
    if not procs.listeners(int(settings["extraction_port"])) or server.healthy(url, timeout=60):
        return launching(journal)
    first = fsio.read_json(ranks[0]) or {}
    return {
        "finished": True,
        "failed": False,
        "phase": "ready",
        "mood": "",
        "line": "ready after {}: layout {}, boundaries {}, final {}, {} rank{}".format(
            clock(time.time() - _begun(journal, "launch")),
            first.get("layout"),
            first.get("boundaries"),
            first.get("final"),
            len(ranks),
            "s" * (len(ranks) > 1),
        ),
    }


def launching(journal: Journal) -> Dict[str, Any]:
    """Where a launch is that is not over, from the server's log alone; asks the server nothing."""
    settings = journal.settings
    attached = Path(settings["dump_dir"]) / "attached"
    ranks = len(list(attached.glob("rank*.json"))) if attached.is_dir() else 0
    stage = loading.look(Job("server", journal.folder).log)
    words = [
        str(stage) if stage.name != loading.READY else "warm-up",
        "capture attached on {} of {} ranks".format(ranks, settings["tensor_parallel"]),
        "{} of at most {}".format(
            clock(time.time() - _begun(journal, "launch")), clock(float(settings.get("launch_timeout", 0)))
        ),
    ]
    return {
        "finished": False,
        "failed": False,
        # a rank that attaches is worth a line of a log, a per cent of the weights is not
        "phase": "{} {}".format(stage.name, ranks),
        "mood": "",
        "line": "launch: " + SEPARATOR.join(words),
    }


# -- the extraction ----------------------------------------------------------------------------------------------------


def extracted(journal: Journal) -> Dict[str, Any]:
    """How the client is doing: {finished, failed, phase, line, mood, result, progress}."""
    job = Job("client", journal.folder)
    state = job.state()
    progress = fsio.read_json(journal.folder / "progress.json") or {}
    result = fsio.read_json(journal.folder / "result.json") or {}
    over = {
        "finished": True,
        "failed": True,
        "phase": "failed",
        "mood": "bad",
        "result": result,
        "progress": progress,
    }
    if state["running"]:
        server_job = Job("server", journal.folder)
        gone = server_job.state()
        if not gone["running"] and not result:  # nobody starts it again within a run: no use in waiting for the client
            line = "the extraction server ended with status {}: {}. Its log: {}"
            return dict(
                over, line=line.format(gone["code"], ending.why_ended(server_job.log, gone["code"]), server_job.log)
            )
        return dict(
            over,
            finished=False,
            failed=False,
            phase=_phase(progress),
            mood="warn" if progress.get("failed") or progress.get("quarantined") or _waits(progress) else "",
            line=progress_line(progress, time.time(), float(journal.document["deadline"]), _stops_at(journal)),
        )
    if not result:
        line = "the client ended with status {} and no result: {}. Its log: {}"
        return dict(over, line=line.format(state["code"], ending.why_ended(job.log, state["code"]), job.log))
    complete = result.get("outcome") == "complete"
    return dict(
        over,
        failed=not complete,
        phase="done" if complete else "failed",
        mood="" if complete else "bad",
        line=str(result.get("message", result)),
    )


def _waits(progress: Mapping[str, Any]) -> bool:
    """Whether a remote fails, or holds the extraction back."""
    moving = progress.get("moving") or {}
    return bool(moving.get("failing_since") or moving.get("holding_since"))


def _phase(progress: Mapping[str, Any]) -> str:
    """A word; a log gets a line when it changes, so also when a remote begins to fail or to hold the extraction back, and when it ends."""
    moving = progress.get("moving") or {}
    return (
        str(progress.get("phase", "starting"))
        + (" failing" if moving.get("failing_since") else "")
        + (" waiting" if moving.get("holding_since") else "")
    )


def _stops_at(journal: Journal) -> Optional[float]:
    """Unix time at which the client takes no more work, as it was told."""
    spec = fsio.read_json(journal.folder / "client.spec.json") or {}
    return spec.get("stop_taking_work_at")


def progress_line(
    progress: Mapping[str, Any], now: float, deadline: Optional[float] = None, stops_at: Optional[float] = None
) -> str:
    """One line for a person, the most important first. ``progress``: the client's progress.json. ``now``, ``deadline`` (production is
    back) and ``stops_at`` (the client takes no more work): unix times."""
    window = [] if deadline is None else ["window {}".format(clock(deadline - now))]
    if not progress:
        return SEPARATOR.join(["extract: the client starts", *window])
    room = []
    if progress.get("dump_free") is not None:
        room.append("/dev/shm {}".format(size(progress["dump_free"])))
    if progress.get("output_free") is not None:
        room.append("disk {} free".format(size(progress["output_free"])))
    phase = progress.get("phase")
    if phase == "canary":
        said = progress.get("message") or "proving the states before the data set"
        return SEPARATOR.join(["canary: {}".format(said), *window, *room])
    done, total = int(progress.get("done", 0)), int(progress.get("total", 0))
    failed, lost = int(progress.get("failed", 0)), int(progress.get("quarantined", 0))
    errors = ["{} errors".format(failed), "{} in quarantine".format(lost)]
    words = ["{:,}/{:,} samples ({:.0f} %)".format(done, total, 100.0 * done / total if total else 0)]
    if failed or lost:
        words += errors
    words.append("{} tokens".format(count(progress.get("tokens_done", 0))))
    # before the first sample is in its place there is no rate; a minute later none is one
    if phase == "extract" and (progress.get("tokens_per_s") or now - float(progress.get("started", 0)) > FIRST):
        words.append("{:,.0f} tokens/s".format(progress.get("tokens_per_s") or 0))
        words.append(rate(progress.get("bytes_per_s") or 0))
        eta = progress.get("eta_s")
        if eta is not None:
            cut = stops_at is not None and now + eta > stops_at
            words.append("ETA {}{}".format(clock(eta), ", after the window" if cut else ""))
    elif phase != "extract" and progress.get("message"):
        words.append(str(progress["message"]))
    moving = progress.get("moving") or {}
    told = moved_words(moving, now)
    # what holds the run back comes first
    words = told + words if moving.get("holding_since") or moving.get("failing_since") else words + told
    words += window + room
    if not (failed or lost):
        words += errors
    silent = now - float(progress.get("updated", now))
    if silent > 30:
        words.insert(0, "the client has written nothing for {}".format(clock(silent)))
    return SEPARATOR.join(words)


def moved_words(moving: Mapping[str, Any], now: float) -> List[str]:
    """How the samples that move on are doing; [] where none do. ``moving``: as in progress.json. ``now``: unix time."""
    if not moving:
        return []
    words = []
    if moving.get("holding_since"):
        words.append("WAITING FOR THE REMOTE for {}".format(clock(now - moving["holding_since"])))
    words.append("{:,} moved, {} to go".format(int(moving.get("moved", 0)), size(moving.get("bytes_waiting", 0))))
    if moving.get("failing_since"):
        words.append(
            "the remote fails since {} ({}); tried again in {}".format(
                clock(now - moving["failing_since"]),
                moving.get("error", ""),
                clock(max((moving.get("retry_at") or now) - now, 0)),
            )
        )
    return words


# -- the restore -------------------------------------------------------------------------------------------------------


def restoring(state_dir: str) -> Dict[str, Any]:
    """How a restore is doing: what :func:`restore.outcome` says, with phase and mood; while production loads, how far it is."""
    found = restore.outcome(state_dir)
    found["phase"], found["mood"] = found["line"], "bad" if found["failed"] else ""
    if found["finished"]:
        return found
    paths = Paths(state_dir)
    journal = Journal.load(paths)
    found["line"] = "restore: " + found["line"].replace("restore: ", "")
    if journal is None or not journal.document["steps"]:
        return found
    last = journal.document["steps"][-1]
    if last["step"] == "restore: check production" and last["state"] == "begun":
        where = production_stage(paths)
        words = ["production loads" + (": " + where if where else ""), clock(time.time() - last["at"])]
        found.update(phase=where, line="restore: " + SEPARATOR.join(words))
    return found


def production_stage(paths: Paths) -> str:
    """Where a production that does not answer yet is with its loading, by its log; "" where its log is not a file."""
    record = fsio.read_json(paths.production) or {}
    log = record.get("stdout") or record.get("stderr") or ""
    if not log.startswith("/") or log.startswith("/dev/"):
        return ""
    stage = loading.look(Path(log))
    if stage.name == loading.READY and not procs.listeners(int(record["port"])):
        return loading.STARTING  # that was said by the server before it
    return str(stage)


# -- words -------------------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Seconds as 9 s, 1:09 (minutes), 1:01:09 (hours)."""
    whole = int(max(seconds, 0))
    if whole < 60:
        return "{} s".format(whole)
    hours, rest = divmod(whole, 3600)
    return "{}:{:02d}:{:02d}".format(hours, *divmod(rest, 60)) if hours else "{}:{:02d}".format(*divmod(rest, 60))


def size(number: float) -> str:
    """Bytes as GB, or TB (decimal)."""
    return "{:.1f} TB".format(number / 1e12) if number >= 1e12 else "{:.1f} GB".format(number / 1e9)


def rate(number: float) -> str:
    """Bytes a second as GB/s; as MB/s where that would be 0.00."""
    return "{:.2f} GB/s".format(number / 1e9) if number >= 1e7 else "{:.1f} MB/s".format(number / 1e6)


def count(number: float) -> str:
    """A count in three or four figures: 980, 12.3k, 4.56M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return "{:.3g}{}".format(number / (limit if unit != "k" else 1e3), unit)
    return "{:,.0f}".format(number)
