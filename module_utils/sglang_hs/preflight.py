"""Reads only: is this host, its production, its engine fit for an extraction? The answer is the run's settings, or the reason."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from . import (
    command,
    engine,
    formats,
    fsio,
    gpus,
    manifest,
    model,
    movesettings,
    procs,
    production,
    rclone,
    secrets,
    server,
    steps,
)
from .errors import HsError
from .journal import Paths
from .production import UNTOUCHED


def look(wanted: Mapping[str, Any], api_key: str = "", dry: bool = False) -> Dict[str, Any]:
    """Examine the host. Returns {settings, production, command, environment, production_command, gpus, engine, model, warnings}.

    ``wanted``: the operator's settings, as the role passes them. Raises HsError with the first thing that does not fit.
    ``dry``: a remote to which samples move is only looked at; else a small file is written there and removed again.
    """
    settings = normalise(wanted)
    _folders(settings)
    remote = _remote(settings, dry)
    if production.ended_by_logout():
        raise HsError(
            "this host ends whatever {} started when the last connection closes (KillUserProcesses of logind): neither the run nor "
            "the guard that brings production back would outlive the link".format(procs.who_am_i()),
            UNTOUCHED,
            "run as root (ansible_become: true in the inventory), or have this user named by KillExcludeUsers in /etc/systemd/logind.conf",
        )
    record = production.take(settings, api_key)
    for key in (
        "state_dir",
        "dump_dir",
    ):  # emptied, or believed, by us: whoever could write there before us would be believed too
        if os.path.lexists(settings[key]):
            steps.refuse_foreign(Path(settings[key]), {int(record["uid"])} if key == "dump_dir" else frozenset())
    info = _ask_production(record)
    env = command.engine_environment(settings, record["env"])
    python = settings["engine_python"] or engine.interpreter(record["argv"], env, record["cwd"])
    if not python:
        raise HsError(
            "the Python of {} cannot be told from its command line".format(record["argv"][:2]),
            UNTOUCHED,
            "set hs_engine_python to the Python that runs SGLang",
        )
    installed = engine.describe(python, env, record["cwd"])
    if settings["no_touch"]:
        engine.refuse_no_touch(installed)
    flags = engine.Flags(installed, env, record["cwd"], _kept_flags(settings["state_dir"]))
    try:
        facts = _examine(settings, record, info)
        known = flags.result()
    finally:
        flags.drop()
    argv = command.extraction(
        record["argv"],
        known,
        int(settings["extraction_port"]),
        settings["attention_backend"],
        settings["drop_arguments"],
        settings["extra_arguments"],
        settings["tokens_per_forward"],
    )
    settings.update(
        engine_python=python,
        engine=installed,
        model=facts["model"],
        max_prompt=facts["max_prompt"],
        remote=remote,
        command=argv,
        tensor_parallel=command.tensor_parallel(argv),
    )
    lib = str(Paths(settings["state_dir"]).lib)
    return {
        "settings": settings,
        "production": production.summary(record),
        "production_command": secrets.command_line(record["argv"]),
        "production_pid": record.get("pid"),
        "unit": record["unit"] if record["kind"] == "systemd" else None,
        "command": argv,
        "environment": command.environment(settings, lib, record["env"]),
        "user": procs.user_name(int(record["uid"])),
        "cwd": record["cwd"],
        "gpus": gpus.inventory(),
        "systemd": production.has_units(),
        "flags": {"key": flags.key, "names": sorted(known)},
        "python": sys.executable,  # runs the restore program: this very interpreter is known to work
    }


def _kept_flags(state_dir: str) -> Optional[Dict[str, Any]]:
    """The engine's options as the last run asked for them; whatever is wrong with that file, it is only a shortcut."""
    try:
        kept = fsio.read_json(Paths(state_dir).flags)
        return kept if isinstance(kept, dict) and isinstance(kept.get("names"), list) else None
    except (HsError, OSError):
        return None


def normalise(wanted: Mapping[str, Any]) -> Dict[str, Any]:
    """The wishes with numbers as numbers: YAML, the command line and older Ansibles each hand some of them over as text."""
    settings = dict(wanted)
    settings["boundaries"] = [_number("boundaries", boundary) for boundary in settings["boundaries"]]
    for key in (
        "production_port",
        "extraction_port",
        "stop_timeout",
        "launch_timeout",
        "production_timeout",
        "controller_patience",
        "in_flight",
        "tokens_per_forward",
        "retries",
        "error_budget",
        "request_timeout",
        "canary_sequences",
        "canary_positions",
        "hook_timeout",
    ):
        settings[key] = _number(key, settings[key])
    for key in (
        "after_returning",
        "production_argv",
        "production_start",
        "production_stop",
        "drop_arguments",
        "extra_arguments",
    ):
        settings[key] = [str(word) for word in settings[key]]
    settings["cut_to"] = _number("cut_to", settings["cut_to"] or 0) or None
    settings["no_touch"] = _yes("no_touch", settings["no_touch"])
    settings["window_s"] = seconds(str(settings["window"]))
    _moves(settings)
    settings["formats"] = formats.chosen(settings["formats"])
    settings["final"] = formats.final_for(settings["formats"], settings["final"])
    return settings


def _remote(settings: Dict[str, Any], dry: bool) -> Optional[Dict[str, Any]]:
    """What :func:`rclone.look` says of the remote that samples move to; None where they stay."""
    if not settings["move_to"]:
        return None
    movesettings.apart(settings["move_to"], settings["output_dir"], UNTOUCHED)
    owner, there = "", 0
    if (Path(settings["output_dir"]) / manifest.FILE).is_file():
        book = manifest.Manifest(Path(settings["output_dir"]), read_only=True)
        owner, there = book.mark(), book.moved_counts()["roots"].get(settings["move_to"], 0)
        book.close()
    found = rclone.look(settings, UNTOUCHED, not dry, owner, there)
    settings["rclone"] = found["program"]
    return found


def _moves(settings: Dict[str, Any]) -> None:
    """The settings of moving; HsError where one of them makes no sense."""
    for key, default in (("move_to", ""), ("rclone", "rclone"), ("rclone_config", ""), ("move_high_water", "80%")):
        settings[key] = str(settings.get(key, default) or "").strip()
    settings["move_to"] = settings["move_to"].rstrip("/") or settings["move_to"]  # as Move.of names it in the book
    settings["rclone_options"] = [str(word) for word in settings.get("rclone_options") or []]
    settings["move_verify"] = str(settings.get("move_verify") or movesettings.AUTO)
    settings["archive"] = str(settings.get("archive") or movesettings.NONE)
    for key, choices in (
        ("move_verify", (movesettings.AUTO, movesettings.DOWNLOAD)),
        ("archive", (movesettings.NONE, movesettings.SAFETENSORS)),
    ):
        if settings[key] not in choices:
            raise HsError(
                "hs_{} holds {!r}".format(key, settings[key]), UNTOUCHED, "choose among {}".format(", ".join(choices))
            )
    try:
        settings["archive_gb"] = float(settings.get("archive_gb", 1.0))
    except (TypeError, ValueError):
        raise HsError(
            "hs_archive_gb holds {!r}, which is no number".format(settings["archive_gb"]), UNTOUCHED, "correct it"
        ) from None
    if not 0 < settings["archive_gb"] < 1e6:  # neither nan
        raise HsError(
            "hs_archive_gb is {}".format(settings["archive_gb"]), UNTOUCHED, "give the GB of an archive, as 1 or 0.5"
        )
    if settings["archive"] != movesettings.NONE and not settings["move_to"]:
        raise HsError(
            "hs_archive is {}, but hs_move_to is empty: archives are made of samples that move".format(
                settings["archive"]
            ),
            UNTOUCHED,
            "set hs_move_to (a folder of another disk will do), or hs_archive to none",
        )
    if settings["move_to"]:
        movesettings.HighWater(settings["move_high_water"])


def _number(name: str, given: Any) -> int:
    try:
        return int(given)
    except (TypeError, ValueError):
        raise HsError(
            "hs_{} holds {!r}, which is no whole number".format(name, given), UNTOUCHED, "correct it in the inventory"
        ) from None


def _yes(name: str, given: Any) -> bool:
    if str(given).lower() not in ("true", "false", "yes", "no", "1", "0"):
        raise HsError(
            "hs_{} holds {!r}, which is neither true nor false".format(name, given),
            UNTOUCHED,
            "correct it in the inventory",
        )
    return str(given).lower() in ("true", "yes", "1")


def seconds(text: str) -> float:
    """A length of time: ``6h``, ``90m``, ``45s`` or ``1h30m``; a bare number is seconds; ``until 06:30`` by the host's own clock."""
    clock = re.fullmatch(r"until (\d{1,2}):(\d\d)", text.strip())
    if clock and int(clock.group(1)) < 24 and int(clock.group(2)) < 60:
        return _until(int(clock.group(1)), int(clock.group(2)), time.time())
    match = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip())
    total = sum(int(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1))) if match else 0
    if total <= 0:
        raise HsError(
            "hs_window holds {!r}, which is no length of time".format(text),
            UNTOUCHED,
            "write it as 6h, 90m, 1h30m, or 'until 06:30' (the host's clock)",
        )
    return float(total)


def _until(hour: int, minute: int, now: float) -> float:
    """Seconds from ``now`` to the next time that the host's clock shows ``hour:minute``."""
    day = time.localtime(now)
    for days in (0, 1):
        # mktime takes a day too many, and knows when the clocks change
        end = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + days, hour, minute, 0, 0, 0, -1))
        if end > now:
            return end - now
    raise AssertionError("no such time within a day")


def _ask_production(record: Mapping[str, Any]) -> Dict[str, Any]:
    """Real generations, and what the server says of itself; {} where production is down on purpose."""
    info: Dict[str, Any] = {}
    if record["expected"] == "running":
        reason = server.healthy(record["url"], record["api_key"])
        if reason:
            raise HsError(
                "production runs ({}) but is not healthy: {}".format(record["pid"], reason),
                UNTOUCHED,
                "mend it: what does not answer before cannot be shown to answer after; if that is known and meant, "
                "say so with hs_production_expected=unhealthy",
            )
        info = server.server_info(record["url"], record["api_key"])
    return info


def _examine(settings: Mapping[str, Any], record: Mapping[str, Any], info: Mapping[str, Any]) -> Dict[str, Any]:
    """Model there, boundaries inside it, extraction port free, no stranger on a GPU."""
    path = settings["model_path"] or command.model_path(record["argv"])
    if not path:
        raise HsError("production's command line names no model", UNTOUCHED, "set hs_model_path")
    path = os.path.normpath(os.path.join(record["cwd"], path))
    described = model.describe(path, command.value(record["argv"], "--dtype") or "auto")
    _boundaries(settings, described)
    port = int(settings["extraction_port"])
    taken = procs.listeners(port)
    if taken:
        who = taken[0].process.describe() if taken[0].process else "a process that we may not see"
        raise HsError(
            "the extraction server's port {} is taken by {}".format(port, who),
            UNTOUCHED,
            "set hs_extraction_port to a free one",
        )
    ours = {process.pid for process in production.members(record)}
    for pid in gpus.strangers(ours):
        process = procs.read(pid)
        raise HsError(
            "a GPU is used by {}".format(
                process.describe() if process else "pid {} (of another container?)".format(pid)
            ),
            UNTOUCHED + "; a stranger's process is never killed",
            "ask its owner to end it, then start again",
        )
    # the server takes a little less than its context; its own figure, where it tells one, is the truth
    context = int(command.value(record["argv"], "--context-length") or described["max_position"])
    own = [int(info[key]) for key in ("max_req_input_len",) if info.get(key)]
    pool = [int(info[key]) for key in ("max_total_num_tokens", "max_total_tokens") if info.get(key)]
    return {"model": described, "max_prompt": min(own + [context - 8] + [tokens - 8 for tokens in pool])}


def _boundaries(settings: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    boundaries = settings["boundaries"]
    last = described["num_layers"] - 1
    wrong = [boundary for boundary in boundaries if not 0 <= boundary <= last]
    if not boundaries or wrong or sorted(set(boundaries)) != list(boundaries):
        raise HsError(
            "hs_boundaries {} does not fit a model of {} layers".format(boundaries, described["num_layers"]),
            UNTOUCHED,
            "give ascending numbers from 0 to {}: boundary i is the residual stream before layer i".format(last),
        )


def _folders(settings: Mapping[str, Any]) -> None:
    """Folders that we write to, and later clean, must be plain ones of their own."""
    places: List[str] = [str(settings[key]) for key in ("state_dir", "dump_dir", "output_dir")]
    for name, place in zip(("hs_state_dir", "hs_dump_dir", "hs_output_dir"), places):
        path = Path(place)
        if not path.is_absolute() or os.path.normpath(place) in (
            "/",
            "/dev/shm",
            "/tmp",
            "/root",
            "/home",
            "/var",
            "/var/lib",
            "/etc",
            "/usr",
        ):
            raise HsError(
                "{} is {!r}: not a folder of its own".format(name, place),
                UNTOUCHED,
                "set it to an absolute path below such a folder",
            )
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise HsError(
                "{} {} is a link or no folder".format(name, place), UNTOUCHED, "give the place itself, or another one"
            )
    marker = Path(places[1])
    if marker.is_dir() and any(marker.iterdir()) and not (marker / "attached").is_dir():
        raise HsError(
            "hs_dump_dir {} holds files that are not ours".format(marker),
            UNTOUCHED,
            "set hs_dump_dir to a folder of its own; it is emptied after a run",
        )
