"""The only code that brings production back. The role, the guard, the boot and the operator's shell all run this.

It decides from the journal and from what it sees, records each step before and after, never skips a step because another one
failed, may be started twice or killed at any point, and says the truth in its last line and exit code.

    stop the client and the extraction server -> GPUs free -> source as it was -> production -> real generations -> disarm -> unlock
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from . import ending, fsio, procs, production, server, shm, spawn, steps, units
from .errors import HsError
from .jobs import Job
from .journal import Journal, Paths, boot_id, closed_runs

# when a restore did not succeed the guard tries again: so often at this distance, then at that one for as long as it takes
RETRIES, RETRY_AFTER, RETRY_LATER = 5, 60.0, 600.0
STEP_PATIENCE = 180.0  # for a forward step of the run that is at work when a restore begins
GUARD_PERIOD = 30.0  # it looks more often than that
BEGIN_PATIENCE = 30.0  # for a run that is beginning: it measures production's decode rate meanwhile
SLOWER = 0.95  # of the decode rate before the run: told, not fatal
STRANGER_PATIENCE = 60.0  # for whoever else listens on production's port; it may be a server that warms up, production itself cannot come
SYSTEMCTL_PATIENCE = 25.0
# seconds from TERM to KILL. Nobody but the client asks the extraction server, and SGLang looks for a TERM only every five seconds, to end
# its own processes with KILL then: production need not wait for that (its unit says the same)
SERVER_GRACE = 0.2


class Report:
    """What a restore found and did."""

    def __init__(self) -> None:
        self.lines: List[str] = []
        self.failures: List[str] = []
        self.changed = False
        self.run_id: Optional[str] = None
        self.ended: List[procs.Process] = []  # what was stopped, for the GPUs to forget

    def say(self, line: str, changed: bool = False) -> None:
        """One more line for the operator."""
        self.lines.append(line)
        self.changed = self.changed or changed

    def as_dict(self) -> Dict[str, Any]:
        """For JSON."""
        return {
            "lines": self.lines,
            "failures": self.failures,
            "changed": self.changed,
            "failed": bool(self.failures),
            "run_id": self.run_id,
        }


def restore(state_dir: str, why: str, run_id: str = "") -> Report:
    """Bring production back and close the run. ``run_id``: only if that run is the open one. Waits for a restore at work."""
    paths = Paths(state_dir)
    report = Report()
    if not paths.state.is_dir():
        report.say("no run has ever been begun on this host: nothing to restore")
        return report
    me = procs.read(os.getpid())
    with fsio.mutex(paths.restoring, 7200, json.dumps({"pid": os.getpid(), "start": me.start if me else 0})):
        journal = Journal.load(paths)
        if journal is None:
            _without_journal(paths, report)
            return report
        if run_id and journal.run_id != run_id:
            report.say("the host is held by {}; run {} has nothing to restore here".format(journal.holder, run_id))
            return report
        report.run_id = journal.run_id
        _restore(paths, journal, why, report)
    return report


def _restore(paths: Paths, journal: Journal, why: str, report: Report) -> None:
    with contextlib.suppress(OSError):
        paths.ballast.unlink()  # room for what follows, where the disk is full
    _record(journal, "restore", "begun", why, STEP_PATIENCE + 60)
    # a forward step that is at work sees the record and ends; it is bounded in time, so is our patience
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(fsio.mutex(paths.mutex, STEP_PATIENCE))
        except HsError:
            report.say("a step of this run does not let go of its lock; going on without it")
        # that step may have written to the journal since
        with contextlib.suppress(HsError):
            journal.document = (Journal.load(paths) or journal).document
        for name, function, lease in _steps(journal):
            _record(journal, "restore: " + name, "begun", lease=lease)
            try:
                function(paths, journal, report)
            except Exception as error:
                text = error.what if isinstance(error, HsError) else "{}: {}".format(type(error).__name__, error)
                advice = " Next: " + error.next if isinstance(error, HsError) and error.next else ""
                report.failures.append("{}: {}{}".format(name, text, advice))
                _record(journal, "restore: " + name, "failed", text.split("\n")[0][:500])
            else:
                _record(journal, "restore: " + name, "done")
        if report.failures:
            tries = int(journal.document.get("restore_tries", 0)) + 1
            pause = RETRY_AFTER if tries < RETRIES else RETRY_LATER
            journal.document.update(restore_tries=tries, retry_at=time.time() + pause)
            _record(journal, "restore", "failed", "; ".join(report.failures)[:1000], pause)
            return
        _record(journal, "restore", "done", why)
        report.changed = True
        with contextlib.suppress(OSError):
            _keep_result(paths, journal)
        # first closed, then unguarded: whoever dies between the two leaves a free host, and a guard that takes itself away
        journal.close("restored", why)
        try:
            _disarm()
        except (OSError, subprocess.SubprocessError) as error:
            # production is back and the guard does nothing without a journal, so this is no reason to hold the host
            report.say("could not take the guard's units away ({}); the next run, or restore, does".format(error))
        report.say("run {} is closed, the host is free".format(journal.run_id))


Step = Callable[[Paths, Journal, Report], None]


def _steps(journal: Journal) -> List[Tuple[str, Step, float]]:
    """The steps in their order, each with the seconds within which it ends by itself: past that its program hangs."""
    settings = journal.settings
    patience = float(settings["stop_timeout"])
    planned: List[Tuple[str, Step, float]] = [
        ("stop extraction", _stop_extraction, 2 * (min(patience, 30) + 90) + 60),
        ("free GPUs", _free_gpus, patience + 60),
        ("restore source", _restore_source, 120),
        ("start production", _start_production, patience + 120 + (600 if settings.get("production_start") else 120)),
        ("check production", _check_production, float(settings["production_timeout"]) + 300),
    ]
    if settings.get("after_returning"):
        planned.append(("return", _return, float(settings["hook_timeout"]) + 60))
    return planned


def _record(journal: Journal, step: str, state: str, detail: str = "", lease: float = 0.0) -> None:
    """A record of the restore. Bookkeeping that fails (a full or broken disk) never keeps production from coming back."""
    with contextlib.suppress(OSError):
        journal.record(step, state, detail, lease)


def _stop_extraction(paths: Paths, journal: Journal, report: Report) -> None:
    patience = float(journal.settings["stop_timeout"])
    failures = []
    segments: Dict[str, int] = {}
    with contextlib.suppress(HsError):
        segments.update(fsio.read_json(journal.folder / steps.SEGMENTS) or {})
    for name, grace in (("client", min(patience, 30)), ("server", SERVER_GRACE)):
        try:
            members = Job(name, journal.folder).members()
            report.ended += members
            segments.update(shm.mapped(one.pid for one in members))
            if Job(name, journal.folder).stop(grace):
                report.say("stopped the extraction {}".format(name), changed=True)
        except HsError as error:
            failures.append(str(error))
    freed = 0 if failures else shm.sweep(segments)
    if freed:
        report.say(
            "removed {:,} KB of shared memory that the extraction server left".format(-(-freed // 1000)), changed=True
        )
    if steps.clear_dumps(Path(journal.settings["dump_dir"])):
        report.say("removed the dump folder {}".format(journal.settings["dump_dir"]), changed=True)
    if failures:
        raise HsError("; ".join(failures))


def _free_gpus(paths: Paths, journal: Journal, report: Report) -> None:
    patience = float(journal.settings["stop_timeout"])
    production.wait_released(report.ended, None, patience)
    record = steps.production_record(paths)
    if production.members(record) or procs.listeners(int(record["port"])):
        return  # it was not stopped, or is back already: the memory is its own
    try:
        production.wait_released([], None, patience, record.get("gpu_baseline"))
    except HsError as error:  # whether production fits beside whoever is there, its own answers will tell
        report.say("{}. {}".format(error.what, error.left))


def _restore_source(paths: Paths, journal: Journal, report: Report) -> None:
    # the block in the file says itself what the original was, so a lost record is no obstacle
    undo_all(paths, report, [str(journal.settings["engine"]["model_file"])])


def edited_files(backup: Path) -> List[str]:
    """The files of which the backup folder has a record: those that are, or were, edited."""
    files = sorted(backup.glob("*.json")) if backup.is_dir() else []
    records = [fsio.read_json(file) for file in files]
    return [record["real_path"] for record in records if isinstance(record, dict) and "real_path" in record]


def undo_all(paths: Paths, report: Report, more: Sequence[str] = ()) -> None:
    """Give every edited file its own bytes back: those on record, and ``more``."""
    # not at every start of a module that only asks; the program on the target has it from its own start, by status
    from . import source_edit

    failures = []
    recorded = edited_files(paths.backup)
    for path in [*recorded, *(path for path in map(os.path.realpath, more) if path not in recorded)]:
        try:
            undone = source_edit.undo(path, str(paths.backup))
            report.say(undone["msg"], changed=undone["changed"])
        except source_edit.EditRefused as error:
            failures.append(str(error))
    if failures:
        raise HsError("; ".join(failures))


def _start_production(paths: Paths, journal: Journal, report: Report) -> None:
    record = steps.production_record(paths)
    if record["expected"] == "stopped":
        report.say("production was down on purpose before the run and stays down")
        return
    found = procs.listeners(int(record["port"]))
    if found:
        same = production.running(record) is not None
        if not same and server.healthy(record["url"], record["api_key"]) is not None:
            who = found[0].process.describe() if found[0].process else "a process that we may not see"
            raise HsError(
                "production's port {} is held by {}, which does not answer as a model server".format(
                    record["port"], who
                ),
                next="end it, or ask its owner; then run playbooks/restore.yml",
            )
        report.say(
            "production runs as before"
            if same
            else "somebody else started a server on production's port and it answers; left alone"
        )
        return
    family = production.members(record)
    if family:
        production.stop(
            record, float(journal.settings["stop_timeout"])
        )  # it lives but listens no more: it was being stopped
    process = production.start(record, paths.run(journal.run_id) / "production.log")
    report.say(
        "started production: {}".format(production.summary(record).partition("; it comes back by ")[2]), changed=True
    )
    if process is not None:
        _keep_pid(paths, record, process)


def _keep_pid(paths: Paths, record: Mapping[str, Any], process: procs.Process) -> None:
    """So that the next run, or try, knows its server. It is told by its argv too, so a full disk does no harm here."""
    with contextlib.suppress(OSError):
        fsio.write_json(paths.production, dict(record, pid=process.pid, start=process.start))


def _check_production(paths: Paths, journal: Journal, report: Report) -> None:
    record = steps.production_record(paths)
    if record["expected"] == "stopped":
        return
    process = procs.read(int(record["pid"])) if record["kind"] == "process" else None
    patience = float(journal.settings["production_timeout"])
    if procs.listeners(int(record["port"])) and production.running(record) is None:
        patience = min(patience, STRANGER_PATIENCE)
    try:
        production.wait(record, process, patience)
    except HsError as error:
        if record["expected"] != "unhealthy":
            raise
        report.say("production runs, and as before the run it does not answer: {}".format(error.what))
        return
    serving = procs.listeners(int(record["port"]))[:1]
    if serving and serving[0].process is not None:
        _keep_pid(paths, record, serving[0].process)
    report.say("production answers on {}".format(record["url"]))
    journal.document["answers"] = {"at": time.time(), "decode_before": record.get("decode_rate"), "decode_after": None}
    before = record.get("decode_rate")
    if before and report.changed:
        after = server.decode_rate(record["url"], record["api_key"]) or 0.0
        journal.document["answers"]["decode_after"] = after
        told = "it decodes {:.0f} tokens/s, before the run {:.0f}".format(after, before)
        slower = after < SLOWER * before
        report.say(told + (": slower than {:.0%} of that; is somebody else asking?".format(SLOWER) if slower else ""))


def _return(paths: Paths, journal: Journal, report: Report) -> None:
    """Put the host into its load balancer again, where that is a command of the host. Not before production answers."""
    argv = list(journal.settings.get("after_returning") or [])
    if not argv or not paths.left.exists():
        return
    if report.failures:
        raise HsError("production is not back, so the host stays out of its load balancer")
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
            timeout=float(journal.settings["hook_timeout"]),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HsError(
            "{}: {}".format(argv[0], error), next="correct hs_after_returning, then run restore.yml"
        ) from error
    if done.returncode:
        told = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        raise HsError(
            "{} ended with {}: {}".format(argv[0], done.returncode, told),
            next="look at the load balancer; production itself answers",
        )
    paths.left.unlink()
    report.say("put the host into its load balancer again", changed=True)


def _disarm() -> None:
    """Take the guard away: with systemd its timer and every unit of the run; without, it ends by itself with the journal."""
    if not production.has_units():
        return
    # on watch until its files are gone: where they cannot go (a power cut, a read-only disk), a later look of its own takes them away
    for unit in units.files():
        unit.unlink()
    _systemctl("stop", units.TIMER)
    _systemctl("daemon-reload")
    _systemctl("reset-failed", "sglang-hs-*")


def _systemctl(*words: str) -> None:
    """Best effort, and bounded: what is wrong is seen by its outcome."""
    subprocess.run(
        ["systemctl", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=SYSTEMCTL_PATIENCE,
    )


def _keep_result(paths: Paths, journal: Journal) -> None:
    """Secrets go with the run: what the jobs were started from holds production's environment."""
    for name in ("server", "client"):
        for file in (Job(name, journal.folder).spec_file, Job(name, journal.folder).environment_file):
            with contextlib.suppress(FileNotFoundError):
                file.unlink()


def _without_journal(paths: Paths, report: Report) -> None:
    """No run is open. Still: a source that is edited (somebody removed the journal by hand) and a lock without a journal are mended."""
    try:
        undo_all(paths, report)
    except HsError as error:
        report.failures.append(str(error))
    _dead_lock(paths, report)
    if production.has_units() and units.files():
        try:
            _disarm()
            report.say("removed units of a run that is closed", changed=True)
        except (OSError, subprocess.SubprocessError) as error:
            report.say("units of a closed run are still there: {}".format(error))
    record = fsio.read_json(paths.production)
    if not record:
        report.say("no run is open: nothing to restore")
        return
    if record["expected"] == "stopped":
        report.say("no run is open; production is down on purpose")
        return
    reason = server.healthy(record["url"], record["api_key"])
    if reason is None:
        report.say("no run is open; production answers on {}".format(record["url"]))
    else:
        report.failures.append(
            "no run is open, so nothing here stopped production, but it does not answer: {}".format(reason)
        )


def _dead_lock(paths: Paths, report: Report) -> None:
    """Remove a lock without a journal. Whoever begins a run holds the mutex from the lock to the journal, so such a lock is dead."""
    if not paths.lock.exists():
        return
    try:
        with fsio.mutex(paths.mutex, BEGIN_PATIENCE):
            if paths.journal.exists():
                report.say("a run has begun meanwhile; it is left alone")
            elif paths.lock.exists():
                paths.lock.unlink()
                with contextlib.suppress(FileNotFoundError):
                    paths.ballast.unlink()
                report.say("removed a lock without a journal (a run died before it began)", changed=True)
    except HsError:
        report.say("a run is beginning right now; it is left alone")


def due(journal: Journal, now: float) -> Optional[str]:
    """Why the guard must restore now, or None: the dead-man's switch, in one function."""
    document = journal.document
    if document["boot_id"] != boot_id():
        return "the host was rebooted during the run"
    if journal.restoring:
        if journal.last("restore") == "failed" and now < document.get("retry_at", 0):
            return None
        return "a restore did not finish"
    if now > journal.restore_by:
        return "the window closed"
    server_state = Job("server", journal.folder).state()
    client_state = Job("client", journal.folder).state()
    if (
        journal.last("launch") is not None
        and server_state["asked"]
        and not server_state["running"]
        and now - server_state["ended"] > 20
    ):
        return "the extraction server ended with status {}".format(server_state["code"])
    if journal.last("extract") is not None and client_state["asked"]:
        # the lease is as old as the client's start; what counts is its end, after which whoever watches is given a chance
        if client_state["running"] or now - client_state["ended"] <= 20:
            return None
        return "the extraction ended and nobody brought production back"
    if now > document["lease"]["until"]:
        return "nobody went on after step {!r}".format(document["lease"]["step"])
    return None


def guard_once(state_dir: str) -> Optional[Report]:
    """One look of the guard; restores when that is due. None when nothing was to do."""
    paths = Paths(state_dir)
    journal = Journal.load(paths)
    if journal is None:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - paths.lock.stat().st_mtime < 60:
                return Report()
            _dead_lock(paths, Report())
        _left_behind(paths)
        return None
    if journal.restoring and fsio.held(paths.restoring):
        return _hung(paths, journal) or Report()  # a restore is at work
    why = due(journal, time.time())
    if why is None:
        return Report()
    return restore(state_dir, "guard: " + why, journal.run_id)


def _left_behind(paths: Paths) -> None:
    """Take away the units of a run that is closed, whose restore was ended before it could; end one that hangs there."""
    if not (production.has_units() and units.files()):
        return
    if fsio.held(paths.restoring):
        closed = [float(run["closed"]["at"]) for run in closed_runs(paths) if "closed" in run]
        if closed and time.time() > max(closed) + 5 * SYSTEMCTL_PATIENCE:
            _end_holder(paths)
        return
    # whoever begins a run holds it from before the units until the journal is there
    with contextlib.suppress(HsError, OSError, subprocess.SubprocessError), fsio.mutex(paths.mutex, BEGIN_PATIENCE):
        if units.files() and not paths.journal.exists() and not paths.lock.exists():
            _disarm()


def _hung(paths: Paths, journal: Journal) -> Optional[Report]:
    """End a restore that is past its step's lease: each step is bounded, so that program is stopped or stuck. The next look restores."""
    if time.time() < journal.document["lease"]["until"]:
        return None
    process = _end_holder(paths)
    if process is None:
        return None
    report = Report()
    report.say("ended a restore that hung at {!r}: {}".format(journal.document["lease"]["step"], process.describe()))
    return report


def _end_holder(paths: Paths) -> Optional[procs.Process]:
    """SIGKILL to the restore at work, by what it wrote into its lock; None where that is not to be told, or it is this process."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder = json.loads(paths.restoring.read_text())
        process = procs.read(int(holder["pid"]))
        if process is not None and process.start == int(holder["start"]) and process.pid != os.getpid():
            procs.signal_process(process, signal.SIGKILL)
            return process
    return None


def guard(state_dir: str, period: float = 1.0) -> None:
    """Watch until no run is open (hosts without systemd)."""
    while True:
        try:
            report = guard_once(state_dir)
        except Exception as error:
            print("{} guard: {}: {}".format(time.strftime("%H:%M:%S"), type(error).__name__, error), flush=True)
            report = Report()
        if report is None:
            return
        for line in report.lines + report.failures:
            print("{} {}".format(time.strftime("%H:%M:%S"), line), flush=True)
        time.sleep(period)


def guard_state(journal: Journal) -> Dict[str, Any]:
    """{kind: timer or process, alive, detail}. The journal knows a guard that is a process; a timer is systemd's."""
    known = journal.document.get("guard") or {}
    if known:
        alive = procs.alive(known["pid"], known["start"])
        return {
            "kind": "process",
            "alive": alive,
            "detail": "pid {}{}".format(known["pid"], "" if alive else " is gone"),
        }
    if not production.has_units():
        return {"kind": "process", "alive": False, "detail": "it was never started"}
    words = ["systemctl", "is-active", units.TIMER]
    out = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout
    state = out.decode().strip() or "unknown"
    return {"kind": "timer", "alive": state == "active", "detail": "{} is {}".format(units.TIMER, state)}


def may_end(state_dir: str, operator: str, take_over: bool) -> None:
    """HsError where the open run is another operator's and at work. One that is orphaned, or that a restore of failed, is anybody's to end."""
    journal = Journal.load(Paths(state_dir))
    if journal is None or take_over or journal.document["operator"] == operator:
        return
    if journal.restoring or due(journal, time.time()) is not None:
        return
    last = journal.document["steps"][-1]
    raise HsError(
        "another operator's run is at work on this host: {}; it is at: {} {}".format(
            journal.holder, last["step"], last["state"]
        ),
        "everything: that run goes on, and production is back by {} at the latest".format(
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(journal.document["deadline"]))
        ),
        "ask them; to end it and have production back now: playbooks/restore.yml -e hs_take_over=true",
    )


def start_detached(state_dir: str, why: str, run_id: str) -> None:
    """Start the installed program in a session of its own: neither a broken link nor the controller's end stops it."""
    paths = Paths(state_dir)
    report = paths.state / "restore.report.json"
    with contextlib.suppress(FileNotFoundError):
        report.unlink()
    words = ["restore", "--state-dir", state_dir, "--why", why, "--report", str(report)] + (
        ["--run-id", run_id] if run_id else []
    )
    with contextlib.suppress(OSError):
        paths.ballast.unlink()  # on a full disk: room for the two files, and the program's own
    process = spawn.detached(spawn.program(paths.lib, *words), str(paths.state / "restore.log"))
    with contextlib.suppress(OSError):
        fsio.write_json(paths.state / "restore.pid.json", {"pid": process.pid, "start": process.start})
    until = time.monotonic() + 10  # from then on it is seen to be at work, whether or not the file could be written
    while procs.alive(process.pid, process.start) and not fsio.held(paths.restoring) and time.monotonic() < until:
        time.sleep(0.05)


def outcome(state_dir: str) -> Dict[str, Any]:
    """How the restore that :func:`start_detached` began is doing: {finished, failed, line, lines, changed}."""
    paths = Paths(state_dir)
    report = fsio.read_json(paths.state / "restore.report.json")
    if report is not None:
        return {
            "finished": True,
            "failed": report["failed"],
            "line": "; ".join(report["failures"] or report["lines"]),
            "lines": report["lines"],
            "changed": report["changed"],
        }
    started = fsio.read_json(paths.state / "restore.pid.json") or {"pid": 0, "start": 0}
    journal = Journal.load(paths)
    if procs.alive(started["pid"], started["start"]) or fsio.held(paths.restoring):
        last = journal.document["steps"][-1] if journal else {"step": "restore", "state": "begun"}
        return {"finished": False, "failed": False, "line": "{} {}".format(last["step"], last["state"]), "lines": []}
    if journal is None:
        return {"finished": True, "failed": False, "line": "the run is closed", "lines": ["the run is closed"]}
    last_words = " | ".join(ending.last_lines(paths.state / "restore.log", 4)) or "it said nothing"
    if _taken_on(journal, time.time()):
        line = "the restore program was ended from outside ({}); the guard begins it again in a moment".format(
            last_words
        )
        return {"finished": False, "failed": False, "line": line, "lines": []}
    return {
        "finished": True,
        "failed": True,
        "line": "the restore program was ended without a report ({}) and nobody begins it again; next, run playbooks/restore.yml".format(
            last_words
        ),
        "lines": [],
    }


def _taken_on(journal: Journal, now: float) -> bool:
    """Whether the guard will go on with a restore whose program is gone: it waits for the lease of the step that was at work."""
    due_by = journal.document["lease"]["until"] + GUARD_PERIOD
    return journal.last("restore") == "begun" and now < due_by and bool(guard_state(journal)["alive"])
