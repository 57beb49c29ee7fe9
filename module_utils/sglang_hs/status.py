"""How a host stands, at any time, without a lock: who, since when, which step, what is edited, production's health, who watches, what next."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from . import fsio, production, restore, server, source_edit, watching
from .errors import HsError
from .jobs import Job
from .journal import Journal, Paths, boot_id, closed_runs


def look(state_dir: str) -> Dict[str, Any]:
    """Read only; nothing is locked. Times are unix times.

    {state_dir, open, last {run_id, operator, at, why, result}, move (what `hs move` says, as movejob writes it) (where none is open),
    run_id, operator, opened, deadline, restore_by, other_boot, restoring, lease, steps, step, server, client, progress
    (the line of the watching), guard {kind, alive, detail}, restore {at_work, tries, failed, failures, retry_at, log}, production
    {how, expected, healthy, reason, log}, edited (paths), sources [{path, state}], lock, situation, next}. What is of a run is absent
    where none is open.
    """
    paths = Paths(state_dir)
    found: Dict[str, Any] = {"state_dir": state_dir, "open": False, "edited": [], "sources": [], "steps": []}
    there = paths.state.is_dir()
    journal = Journal.load(paths) if there else None
    found["sources"] = _sources(paths, journal)
    found["edited"] = [source["path"] for source in found["sources"] if source["state"] in ("patched", "foreign")]
    found["lock"] = there and paths.lock.exists()
    found["restore"] = _restore(paths, journal)
    record = fsio.read_json(paths.production) if there else None
    if record:
        reason = server.healthy(record["url"], record.get("api_key", ""), timeout=10)
        log = record.get("stdout") or record.get("stderr") or ""
        found["production"] = {
            "how": production.summary(record),
            "expected": record["expected"],
            "healthy": reason is None,
            "reason": reason,
            "log": "journalctl -u {}".format(record["unit"]) if record.get("unit") else log,
        }
    if journal is not None:
        found.update(_run(journal))
    elif there:
        found["last"] = _last(paths)
        found["move"] = fsio.read_json(paths.state / "move.json")
    found["situation"], found["next"] = _situation(found)
    return found


def _sources(paths: Paths, journal: Optional[Journal]) -> List[Dict[str, Any]]:
    """The files that a run edits or edited, with the state of each."""
    files = restore.edited_files(paths.backup)
    if journal is not None:
        asked = os.path.realpath(str(journal.settings["engine"]["model_file"]))
        files += [asked] if asked not in files else []
    seen = []
    for path in files:
        try:
            state = source_edit.inspect(path, str(paths.backup))["state"]
        except source_edit.EditRefused as error:
            state = "unreadable: {}".format(str(error).split("\n")[0])
        seen.append({"path": path, "state": state})
    return seen


def _last(paths: Paths) -> Optional[Dict[str, Any]]:
    """The run that was closed last; None where there was none."""
    closed = [document for document in closed_runs(paths) if "closed" in document]
    if not closed:
        return None
    document = max(closed, key=lambda one: float(one["closed"]["at"]))
    result = fsio.read_json(paths.run(document["run_id"]) / "result.json") or {}
    return {
        "run_id": document["run_id"],
        "operator": document["operator"],
        "at": document["closed"]["at"],
        "why": document["closed"]["why"],
        "result": result.get("message", "no sample was asked for"),
    }


def _run(journal: Journal) -> Dict[str, Any]:
    """What only an open run has."""
    document = journal.document
    found: Dict[str, Any] = {
        "open": True,
        "restoring": journal.restoring,
        "steps": document["steps"],
        "step": document["steps"][-1]
        if document["steps"]
        else {"step": "begin", "state": "begun", "at": document["opened"]},
        "lease": document["lease"],
        "restore_by": journal.restore_by,
        "other_boot": document["boot_id"] != boot_id(),
        "guard": restore.guard_state(journal),
        "folder": str(journal.folder),
    }
    found.update({key: document.get(key) for key in ("run_id", "operator", "opened", "deadline")})
    for name in ("server", "client"):
        found[name] = Job(name, journal.folder).state()
    found["progress"] = ""
    try:
        if journal.restoring:
            found["progress"] = watching.restoring(str(journal.paths.state))["line"] if _at_work(journal.paths) else ""
        elif found["client"]["asked"]:
            found["progress"] = watching.extracted(journal)["line"]
        elif found["server"]["asked"] and journal.last("launch") == "begun":
            # by the log alone: a status asks the extraction server nothing
            found["progress"] = watching.launching(journal)["line"]
    except HsError as error:
        found["progress"] = str(error).split("\n")[0]
    return found


def _restore(paths: Paths, journal: Optional[Journal]) -> Dict[str, Any]:
    """{at_work, tries, failed, failures, retry_at, log}: the restore of the open run."""
    found: Dict[str, Any] = {
        "at_work": _at_work(paths),
        "tries": 0,
        "failed": False,
        "failures": "",
    }
    found.update(retry_at=None, log="")
    if journal is None:
        return found
    ends = [record for record in journal.document["steps"] if record["step"] == "restore"]
    failed = bool(ends) and ends[-1]["state"] == "failed"
    tries = int(journal.document.get("restore_tries", 0))
    found.update(tries=tries, failed=failed, failures=ends[-1].get("detail", "") if failed else "")
    if failed:
        found["retry_at"] = journal.document.get("retry_at")
    # production that was started from here writes there if it has no log of its own
    own = journal.folder / "production.log"
    found["log"] = str(own) if own.exists() else ""
    return found


def _at_work(paths: Paths) -> bool:
    """Whether a restore holds its lock now; looked up in the kernel's table, so that looking stands in nobody's way."""
    lock = os.path.realpath(str(paths.state / ".restore"))
    try:
        info = os.stat(lock)
        rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    except OSError:
        return False
    # number, FLOCK, ADVISORY, WRITE, pid, device:device:inode, ...; who waits has an arrow after the number
    for row in rows:
        if len(row) > 5 and row[1] == "FLOCK" and row[5].rpartition(":")[2] == str(info.st_ino):
            # the device is not always stat's (btrfs, overlays): the holder's own open files say whether it is this one
            held = _opened(int(row[4]))
            if lock in held or (not held and row[5].startswith(_device(info.st_dev))):
                return True
    return False


def _device(number: int) -> str:
    """As /proc/locks writes it."""
    return "{:02x}:{:02x}:".format(os.major(number), os.minor(number))


def _opened(pid: int) -> List[str]:
    """The files that a process has open; [] where that may not be seen."""
    found = []
    try:
        for entry in os.listdir("/proc/{}/fd".format(pid)):
            found.append(os.readlink("/proc/{}/fd/{}".format(pid, entry)))
    except OSError:
        pass  # it ended, or is not ours: what was seen so far
    return found


# -- what next ---------------------------------------------------------------------------------------------------------


def _situation(found: Dict[str, Any]) -> Tuple[str, str]:
    """(one word, what to do)."""
    known = found.get("production") or {}
    tried = found["restore"]
    if not found["open"]:
        if tried["at_work"]:
            return "restoring", "wait: a restore is at work"
        if found["edited"] or found["lock"]:
            what = "the engine's source is still edited" if found["edited"] else "a lock without a run is left"
            return "left over", "run playbooks/restore.yml (or {}/hs restore): {}".format(found["state_dir"], what)
        if known and not known["healthy"] and known["expected"] != "stopped":
            return "production silent", (
                "no run of this project is open, so nothing here stopped production: look at its log ({}), then start it as it "
                "is started otherwise".format(known["log"] or "not known")
            )
        return "idle", "nothing: no run is open"
    if tried["at_work"]:
        return "restoring", "wait: the restore is at work; playbooks/restore.yml waits with you and tells how it ended"
    if tried["failed"]:
        read = " and ".join(place for place in (tried["log"], known.get("log")) if place) or found["folder"]
        again = (
            "the guard tries again at {} (tries so far: {})".format(_clock(tried["retry_at"]), tried["tries"])
            if tried["retry_at"] and found["guard"]["alive"]
            else "nobody tries again by himself"
        )
        return "restore failed", "read {}, mend what the failure says, then run playbooks/restore.yml; {}".format(
            read, again
        )
    if found["other_boot"]:
        if found["guard"]["alive"]:
            return "rebooted", "wait: the guard restores in a moment; playbooks/restore.yml waits with you"
        return "rebooted", "run playbooks/restore.yml (or {}/hs restore) now".format(found["state_dir"])
    if not found["guard"]["alive"]:
        return "unguarded", (
            "run playbooks/extract.yml again, which sets the guard on watch and goes on, or playbooks/restore.yml, which brings "
            "production back now"
        )
    return "running", (
        "playbooks/extract.yml again goes on watching (as {}); playbooks/restore.yml brings production back now; the logs: "
        "{}".format(found["operator"], found["folder"])
    )


# -- for a person ------------------------------------------------------------------------------------------------------


def lines(found: Dict[str, Any]) -> List[str]:
    """The same for a person."""
    said: List[str] = []
    if found["open"]:
        said += _run_lines(found)
    else:
        said.append("no run is open" + ("; a restore is at work" if found["restore"]["at_work"] else ""))
        last = found.get("last")
        if last:
            said.append(
                "last run: {} of {}, closed {} ({}): {}".format(
                    last["run_id"], last["operator"], _clock(last["at"]), last["why"], last["result"]
                )
            )
        move = found.get("move")
        if move:
            said.append("move: {} ({})".format(move["line"].replace("move: ", "", 1), _clock(move["updated"])))
        if found["lock"]:
            said.append("lock: left by a run that died before it began")
    if found.get("production"):
        said.append("production: {} - {}".format(found["production"]["how"], _health(found)))
    said.append("engine source: {}".format(_source_words(found)))
    said.append("next: {}".format(found["next"]))
    return said


def _run_lines(found: Dict[str, Any]) -> List[str]:
    last = found["step"]
    said = [
        "run {} of {}, begun {}".format(found["run_id"], found["operator"], _clock(found["opened"])),
        "step: {} {} at {}; production is back by {} at the latest".format(
            last["step"], last["state"], _clock(last["at"]), _clock(found["deadline"])
        ),
    ]
    if found["other_boot"]:
        said.append("ATTENTION: this run is from before the host's last boot; none of its processes can be left")
    guard = found["guard"]
    if guard["alive"]:
        said.append(
            "guard: on watch ({}); restores at {} at the latest, or if nobody goes on after step {!r} by {}".format(
                guard["detail"], _clock(found["restore_by"]), found["lease"]["step"], _clock(found["lease"]["until"])
            )
        )
    else:
        said.append(
            "ATTENTION: NO GUARD IS ON WATCH ({}): if nobody restores, production does not come back by itself".format(
                guard["detail"]
            )
        )
    for name in ("server", "client"):
        state = found[name]
        if state["asked"]:
            now = "pid {}".format(state["pid"]) if state["running"] else "ended with status {}".format(state["code"])
            said.append("extraction {}: {}".format(name, now))
    if found["progress"]:
        said.append("progress: {}".format(found["progress"]))
    tried = found["restore"]
    if tried["failed"] and not tried["at_work"]:
        said.append("ATTENTION: the restore failed {} times: {}".format(tried["tries"], tried["failures"]))
    return said


def _health(found: Dict[str, Any]) -> str:
    known = found["production"]
    if known["healthy"]:
        return "answers"
    away = found["open"] and any(record["step"] == "stop" for record in found["steps"])
    if away and not found["restoring"]:
        return "stopped by this run"
    return "does not answer: {}".format(known["reason"])


def _source_words(found: Dict[str, Any]) -> str:
    if found["edited"]:
        return "edited: " + ", ".join(found["edited"])
    odd = [source for source in found["sources"] if source["state"] != "pristine"]
    if odd:
        return "; ".join("{} ({})".format(source["path"], source["state"]) for source in odd)
    return "as it was"


def _clock(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
