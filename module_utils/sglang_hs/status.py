"""How a host stands, at any time, without a lock: who, since when, which step, what is edited, production's health, what next."""

from __future__ import annotations

import time
from typing import Any, Dict, List

from . import fsio, production, restore, server, source_edit, steps
from .errors import HsError
from .jobs import Job
from .journal import Journal, Paths


def look(state_dir: str) -> Dict[str, Any]:
    """Read only. {open, run_id, operator, opened, deadline, steps, server, client, progress, edited, production, next}."""
    paths = Paths(state_dir)
    found: Dict[str, Any] = {"state_dir": state_dir, "open": False, "edited": [], "steps": []}
    journal = Journal.load(paths) if paths.state.is_dir() else None
    found["edited"] = [
        path
        for path in restore.edited_files(paths.backup)
        if source_edit.inspect(path, str(paths.backup))["state"] != "pristine"
    ]
    record = fsio.read_json(paths.production) if paths.state.is_dir() else None
    if record:
        reason = server.healthy(record["url"], record.get("api_key", ""), timeout=10)
        found["production"] = {"how": production.summary(record), "healthy": reason is None, "reason": reason}
    if journal is None:
        found["next"] = "nothing: no run is open"
        return found
    found.update(
        open=True, restoring=journal.restoring, steps=journal.document["steps"], lease=journal.document["lease"]
    )
    found.update({key: journal.document.get(key) for key in ("run_id", "operator", "opened", "deadline")})
    for name in ("server", "client"):
        found[name] = Job(name, journal.folder).state()
    try:
        found["progress"] = steps.extracted(journal)["line"] if found["client"]["asked"] else ""
    except HsError as error:
        found["progress"] = str(error)
    found["next"] = "playbooks/restore.yml brings production back now; playbooks/extract.yml goes on watching"
    return found


def lines(found: Dict[str, Any]) -> List[str]:
    """The same for a person."""
    said: List[str] = []
    if found["open"]:
        last = found["steps"][-1] if found["steps"] else {"step": "begin", "state": "begun"}
        said.append("run {} of {}, begun {}".format(found["run_id"], found["operator"], _clock(found["opened"])))
        said.append(
            "step: {} {}; production is back by {} at the latest".format(
                last["step"], last["state"], _clock(found["deadline"])
            )
        )
        for name in ("server", "client"):
            state = found[name]
            if state["asked"]:
                said.append(
                    "extraction {}: {}".format(
                        name,
                        "pid {}".format(state["pid"])
                        if state["running"]
                        else "ended with status {}".format(state["code"]),
                    )
                )
        if found.get("progress"):
            said.append("progress: {}".format(found["progress"]))
    else:
        said.append("no run is open")
    if found.get("production"):
        known = found["production"]
        said.append(
            "production: {} - {}".format(
                known["how"], "answers" if known["healthy"] else "does not answer: {}".format(known["reason"])
            )
        )
    said.append("engine source: {}".format("edited: " + ", ".join(found["edited"]) if found["edited"] else "as it was"))
    said.append("next: {}".format(found["next"]))
    return said


def _clock(stamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stamp))
