"""The forward steps of a run on the target: begin, stop, launch, extract - each recorded before and after, each safe to repeat.

None of them goes on once a restore has begun.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import stat
import threading
from pathlib import Path
from typing import AbstractSet, Any, Dict, Iterator, List, Mapping, Optional

from . import command, fsio, procs, production, secrets, server, shm, spawn, units
from .errors import HsError
from .jobs import UNITS, Job
from .journal import SHARE, Journal, Paths
from .turns import forward, turn

DUMP_FOLDERS = ("attached", "want", "done", "used", "failed")
SEGMENTS = "server.shm.json"
DUMP_FILES = (".client.lock", "every_rank")


def begin(
    state_dir: str,
    view: Mapping[str, Any],
    wanted: Mapping[str, Any],
    operator: str,
    api_key: str = "",
    take_over: bool = False,
    share: str = "",
    unit_files: Optional[Mapping[str, str]] = None,
) -> Dict[str, Any]:
    """Set the guard on watch, take the host's lock, open the journal, record production. {run_id, attached, changed}.

    ``view``: what preflight found; its ``settings`` are the run's. ``unit_files``: path -> text, with :data:`units.RUN` for the run's name,
    where the run has units. A run of the same operator with the same wishes that is still open is *attached to*: the steps that are done
    are not done again.
    ``share``: the host's part of the data set, packed.
    """
    texts = dict(unit_files or {})
    paths = Paths(state_dir)
    paths.make()
    with turn(paths):
        journal = Journal.load(paths)
        attached = journal is not None
        if journal is not None:
            may_attach(journal, wanted, operator, take_over)
            journal.record("begin", "done", "attached by {}".format(operator))
        else:
            record = production.take(view["settings"], api_key)
            with decode_rate(record):  # takes a second, as does systemd
                if production.has_units():  # first: a run is watched over from its first moment, whatever becomes of us
                    units.arm({path: text for path, text in texts.items() if Path(path).name.startswith(units.GUARD)})
            journal = Journal.open(paths, operator, view, wanted, record, share)
            journal.record("begin", "done")
        watch(paths, journal)
        if production.has_units():
            units.arm({path: text.replace(units.RUN, journal.run_id) for path, text in texts.items()})
        return {"run_id": journal.run_id, "attached": attached, "changed": not attached}


@contextlib.contextmanager
def decode_rate(record: Dict[str, Any]) -> Iterator[None]:
    """Measure production's decode rate beside what is done within; it is in ``record`` afterwards, where production is to run."""
    if record["expected"] != "running":
        yield
        return
    found: List[Optional[float]] = []
    asking = threading.Thread(target=lambda: found.append(server.decode_rate(record["url"], record["api_key"])))
    asking.start()
    try:
        yield
    finally:
        asking.join()
    record["decode_rate"] = found[0] if found else None


def may_attach(journal: Journal, wanted: Mapping[str, Any], operator: str, take_over: bool) -> None:
    """HsError unless this operator may go on with the open run."""
    if journal.restoring:
        raise HsError(
            "run {} is being restored right now, or its restore failed: {}".format(journal.run_id, journal.holder),
            "everything",
            "run playbooks/restore.yml: it waits for the restore, or finishes it, and tells what is wrong",
        )
    if journal.document["operator"] != operator and not take_over:
        raise HsError(
            "another operator's run is open on this host: {}".format(journal.holder),
            "everything: that run goes on",
            "ask them; to go on with their run yourself set hs_take_over=true; to end it run playbooks/restore.yml",
        )
    if journal.document.get("wanted") != dict(wanted):
        theirs = journal.document.get("wanted") or {}
        other = sorted(key for key in set(theirs) | set(wanted) if theirs.get(key) != wanted.get(key))
        raise HsError(
            "run {} is open with other settings: {}".format(
                journal.run_id,
                ", ".join("{}={!r} there, {!r} here".format(key, theirs.get(key), wanted.get(key)) for key in other),
            ),
            "everything: that run goes on",
            "to go on with it give the same settings: {}; or end it with playbooks/restore.yml".format(
                "-e " + shlex.quote(json.dumps({"hs_" + key: theirs.get(key) for key in other}))
            ),
        )


def watch(paths: Paths, journal: Journal) -> None:
    """Without systemd: the guard as a process of its own session (with systemd it is a timer)."""
    if production.has_units():
        return
    found = journal.document.get("guard") or {}
    if found and procs.alive(found["pid"], found["start"]):
        return
    process = spawn.detached(
        spawn.program(paths.lib, "guard", "--state-dir", str(paths.state)), str(journal.folder / "guard.log")
    )
    journal.document["guard"] = {"pid": process.pid, "start": process.start}
    journal.save()


def armed(paths: Paths, journal: Journal) -> Optional[str]:
    """None when the dead-man's switch is on watch, else what is wrong with it. Production is not stopped without one."""
    if not production.has_units():
        watch(paths, journal)  # a guard that died is started anew
        found = journal.document.get("guard") or {}
        return None if found and procs.alive(found["pid"], found["start"]) else "the guard's process does not run"
    for unit in (*UNITS.values(), "sglang-hs-guard.service", "sglang-hs-guard.timer"):
        out = production.run(["systemctl", "show", "-p", "LoadState,ActiveState", unit], 60)
        show = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        if show.get("LoadState") != "loaded":
            return "systemd has not loaded {}: {}".format(unit, show.get("LoadState"))
        if unit.endswith(".timer") and show.get("ActiveState") != "active":
            return "{} is {}".format(unit, show.get("ActiveState"))
    return None


def production_record(paths: Paths) -> Dict[str, Any]:
    """production.json. Raises HsError when it is missing."""
    record = fsio.read_json(paths.production)
    if not isinstance(record, dict):
        raise HsError(
            "{} is missing: how production was started is not known".format(paths.production),
            next="start production by hand, then run playbooks/restore.yml",
        )
    return record


def stop(state_dir: str, run_id: str) -> Dict[str, Any]:
    """Stop production. {changed, said}."""
    paths = Paths(state_dir)
    with turn(paths):
        journal = forward(paths, run_id)
        settings = journal.settings
        record = production_record(paths)
        if record["expected"] == "stopped":
            return {"changed": False, "said": ["production is down on purpose"]}
        process = production.running(record)
        if process is not None and (process.pid, process.start) != (record["pid"], record["start"]):
            again = production.take(settings, record["api_key"])  # restarted a moment ago
            record = dict(again, run_id=run_id, decode_rate=record.get("decode_rate"))
            fsio.write_json(paths.production, record)
        patience = float(settings["stop_timeout"])
        running = bool(production.members(record))
        wrong = armed(paths, journal) if running else None
        if wrong:
            raise HsError(
                "the dead-man's switch is not armed: {}".format(wrong),
                production.UNTOUCHED,
                "look at it (systemctl status 'sglang-hs-*' on the host), then start playbooks/extract.yml again",
            )
        with journal.step("stop", 2 * patience + 300):
            said = production.stop(record, patience)
        return {"changed": running, "said": said or ["production was stopped already"]}


def launch(state_dir: str, run_id: str) -> Dict[str, Any]:
    """Start the extraction server and let go; :func:`progress` tells when it is ready. {changed, said}."""
    paths = Paths(state_dir)
    with turn(paths):
        journal = forward(paths, run_id)
        settings = journal.settings
        record = production_record(paths)
        job = Job("server", journal.folder)
        if job.state()["running"]:
            return {"changed": False, "said": ["the extraction server runs already"]}
        dump_folder(Path(settings["dump_dir"]), int(record["uid"]), int(record["gid"]))
        env = command.inherited(record["env"])
        env.update(command.environment(settings, str(paths.lib), record["env"]))
        spec: Dict[str, Any] = {
            key: record[key] for key in ("cwd", "uid", "gid", "groups", "umask", "limits") if key in record
        }
        job.prepare(dict(spec, argv=settings["command"], env=env))
        journal.record("launch", "begun", lease=float(settings["launch_timeout"]) + journal.patience)
        job.start(paths.lib)
        return {"changed": True, "said": ["log: {}".format(job.log)]}


def dump_folder(folder: Path, uid: int, gid: int) -> None:
    """An empty dump folder for the server's user alone. Leftovers of a dead run are removed, strangers' files never."""
    clear_dumps(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for place in (folder, *(folder / name for name in DUMP_FOLDERS)):
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
        refuse_foreign(place, {uid})
        if os.geteuid() == 0:
            os.chown(str(place), uid, gid, follow_symlinks=False)
            os.chmod(str(place), 0o700)


def refuse_foreign(folder: Path, owners: AbstractSet[int] = frozenset()) -> None:
    """HsError unless ``folder`` is a plain folder of ours, of root, or of one of ``owners`` (uids): /dev/shm is everybody's."""
    seen = os.lstat(str(folder))
    if not stat.S_ISDIR(seen.st_mode):
        raise HsError(
            "{} is a link or no folder".format(folder), production.UNTOUCHED, "give the place itself, or another one"
        )
    if seen.st_uid not in {0, os.geteuid(), *owners}:
        raise HsError(
            "{} belongs to {}".format(folder, procs.user_name(seen.st_uid)),
            production.UNTOUCHED,
            "ask its owner to remove it, or name another folder",
        )


def clear_dumps(folder: Path) -> bool:
    """Remove what a run left in the dump folder, and the folder itself when nothing else is in it."""
    if folder.is_symlink() or not (folder / "attached").is_dir():
        return False
    for name in DUMP_FOLDERS:
        if not (folder / name).is_symlink():
            shutil.rmtree(str(folder / name), ignore_errors=True)
    for name in DUMP_FILES:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
    with contextlib.suppress(OSError):  # a mount point, or a stranger's file: it stays
        folder.rmdir()
    return True


def extract(state_dir: str, run_id: str) -> Dict[str, Any]:
    """Start the client (canary first, then the data) and let go. {changed, said}."""
    paths = Paths(state_dir)
    with turn(paths):
        journal = forward(paths, run_id)
        if journal.last("launch") != "done":
            raise HsError(
                "the extraction server was not launched in run {}".format(run_id),
                next="start playbooks/extract.yml from its beginning",
            )
        job = Job("client", journal.folder)
        state = job.state()
        result = fsio.read_json(journal.folder / "result.json") or {}
        if state["running"] or (state["asked"] and result.get("outcome") == "complete"):
            return {"changed": False, "said": ["the client runs already"]}
        with contextlib.suppress(FileNotFoundError):
            (journal.folder / "result.json").unlink()
        # while it lives, so that what it leaves behind is known as its own when it was killed
        fsio.write_json(
            journal.folder / SEGMENTS, shm.mapped(one.pid for one in Job("server", journal.folder).members())
        )
        record = production_record(paths)
        spec_file = journal.folder / "client.spec.json"
        fsio.write_json(spec_file, client_spec(paths, journal, record))
        env = command.inherited(command.engine_environment(journal.settings, record["env"]))
        path = env.get("PYTHONPATH", "")
        env.update(
            PYTHONPATH=str(paths.lib) + (":" + path if path else ""), CUDA_VISIBLE_DEVICES="", PYTHONUNBUFFERED="1"
        )
        env.pop("SGLANG_HS_DUMP_DIR", None)
        argv = [journal.settings["engine_python"], "-m", "sglang_hs_client", "run", "--spec", str(spec_file)]
        job.prepare({"argv": argv, "env": env, "cwd": str(journal.folder)})
        journal.record("extract", "begun")
        job.start(paths.lib)
        return {"changed": True, "said": ["log: {}".format(job.log)]}


def in_flight(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Prompts, and tokens where several share a forward, that the client keeps at the server: what is computed and what comes next."""
    tokens = int(settings["tokens_per_forward"])
    if not tokens:
        return {"in_flight": int(settings["in_flight"]), "tokens_in_flight": None}
    return {"in_flight": max(int(settings["in_flight"]), command.PROMPTS_IN_FLIGHT), "tokens_in_flight": 2 * tokens}


def engine_file(paths: Paths, settings: Mapping[str, Any]) -> Dict[str, Any]:
    """The source that the engine runs, for the output's description: {path, state, sha256, sha256_pristine, variant}."""
    from . import source_edit  # a module compiles what it imports at every start, and most steps look at no source

    seen = source_edit.inspect(settings["engine"]["model_file"], str(paths.state / "backup"))
    return {key: seen[key] for key in ("path", "state", "sha256", "sha256_pristine", "variant")}


def move_spec(settings: Mapping[str, Any]) -> Dict[str, Any]:
    """Where finished samples move on to, as the client is told it; {} where they stay. Of an older run's settings: they stay."""
    if not settings.get("move_to"):
        return {}
    return {
        "to": settings["move_to"],
        "rclone": settings["rclone"],
        "config": settings["rclone_config"],
        "options": list(settings["rclone_options"]),
        "high_water": settings["move_high_water"],
        "verify": settings["move_verify"],
        "archive": settings["archive"],
        "archive_bytes": int(settings["archive_gb"] * 1e9),
    }


def client_spec(paths: Paths, journal: Journal, record: Mapping[str, Any]) -> Dict[str, Any]:
    """What the client is told. ``record``: production's."""
    settings = journal.settings
    model = settings["model"]
    return {
        "run_id": journal.run_id,
        "run_dir": str(journal.folder),
        "server": "http://127.0.0.1:{}".format(settings["extraction_port"]),
        "dataset": settings["dataset"],
        "output_dir": settings["output_dir"],
        "dump_dir": settings["dump_dir"],
        "boundaries": settings["boundaries"],
        "final": settings["final"],
        "cut_to": settings["cut_to"],
        **in_flight(settings),
        "retries": settings["retries"],
        # rows that the operator chose to go without are no errors
        "error_budget": settings["error_budget"] + settings["bad_rows"],
        "request_timeout_s": settings["request_timeout"],
        "canary": {"sequences": settings["canary_sequences"], "positions": settings["canary_positions"]},
        "model_path": model["path"],
        "hidden_size": model["hidden_size"],
        "vocab_size": model["vocab_size"],
        "max_prompt": settings["max_prompt"],
        "move": move_spec(settings),
        # what is in flight then is finished, and the servers change places
        "stop_taking_work_at": journal.restore_by - min(float(settings["stop_timeout"]), 60.0),
        **({"share": str(journal.folder / SHARE)} if settings.get("shared") else {}),
        "provenance": {
            "engine": settings["engine"],
            "model": model,
            "engine_file": engine_file(paths, settings),
            "way_in": "package" if settings["no_touch"] else "edit",
            "launch": {
                "argv": secrets.command_line(settings["command"]),
                "environment": secrets.environment(command.environment(settings, str(paths.lib), record["env"])),
            },
            "operator": journal.document["operator"],
            "tensor_parallel": settings["tensor_parallel"],
        },
    }
