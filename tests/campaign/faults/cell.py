"""One cell of the matrix: a run, one fault at one step, and what is seen from outside when it is over."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from . import moments
from .faults import EXTRACT, FAULTS, RESTORE_BOOK, Fault, Strike
from .host import OUTPUT, STATE, FaultHost
from .moments import FORWARD, RESTORE, STEPS

SAMPLES = 64
SETTINGS: dict[str, object] = {
    "hs_operator": "matrix@controller",
    "hs_disk_reserve_gb": 0.01,
    "hs_controller_patience": 20,
    "hs_link_patience": 45,
    "hs_stop_timeout": 10,
    "hs_launch_timeout": 150,
    "hs_production_timeout": 150,
}
PATIENCE = 480.0  # for a run to be closed after the blow; leases are shorter
# what may lie in the state folder of a host on which no run is open
KEPT = {".mutex", ".restore", "backup", "flags.json", "hs", "lib", "production.json", "runs"}
KEPT |= {"restore.log", "restore.pid.json", "restore.report.json"}


@dataclass
class Result:
    """What came of a cell. ``problems``: what was not as it must be; ``notes``: what a reader of the table should know."""

    step: str
    fault: str
    struck: bool = False
    code: int | None = None
    accepted: int = 0
    why: str = ""  # the run was closed, from its journal
    back: float = 0.0  # seconds from the blow until the run was closed
    mended: bool = False  # a person had to take the fault away before the run could be closed
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def make_ready(host: FaultHost) -> None:
    """An empty output, the engine as it was, production answering; raises RuntimeError where the host is beyond that."""
    host.inside(f"find {OUTPUT} -mindepth 1 -delete; rm -f /dev/shm/stranger.bin {STATE}/stranger.bin")
    host.inside(
        "mkdir -p /var/tmp && test -f /var/tmp/pristine.py || cp -p %s/srt/models/deepseek_v2.py /var/tmp/pristine.py"
        % host.source
    )
    host.inside(
        "test -f /var/tmp/upgraded.py || { cp -p /var/tmp/pristine.py /var/tmp/upgraded.py; echo '# the next release' >> /var/tmp/upgraded.py; }"
    )
    if host.journal() is not None:
        raise RuntimeError("a run is open")
    if (
        host.inside(
            f"cmp /var/tmp/pristine.py {host.source}/srt/models/deepseek_v2.py >/dev/null && echo same || echo other"
        ).strip()
        == "other"
    ):
        host.inside(f"cp -p /var/tmp/pristine.py {host.source}/srt/models/deepseek_v2.py")


def play(host: FaultHost, step: str, fault: Fault) -> Result:
    """Play the cell and judge it."""
    make_ready(host)
    result = Result(step, fault.name)
    strike = Strike(host, step)
    host.settings = ["-e", json.dumps({**SETTINGS, **fault.settings})]
    try:
        if fault.own_play is not None:
            book, words = fault.own_play(strike)
            strike.playing = host.begin(book, *words, *host.settings)
            result.struck = True
        else:
            _strike(strike, fault, result)
        _over(strike, result)
    finally:
        _mend(strike, result)
        if strike.playing is not None and strike.playing.poll() is None:
            os.killpg(strike.playing.pid, signal.SIGKILL)
            strike.playing.wait()
    _judge(strike, fault, result)
    return result


def _strike(strike: Strike, fault: Fault, result: Result) -> None:
    host, step = strike.host, strike.step
    if fault.name == "fails" and step == "lock":
        from .faults import _lock_fails

        _lock_fails(strike)
    strike.playing = host.begin(EXTRACT, *host.settings)

    def still() -> bool:
        return strike.playing is not None and strike.playing.poll() is None

    if fault.setup is not None and step != "lock":
        earlier = "extract" if step in RESTORE else STEPS[STEPS.index(step) - 1]
        if moments.wait(host, earlier, still):
            fault.setup(strike)
    result.struck = moments.wait(host, step, still)
    if result.struck:
        fault.strike(strike)


def _over(strike: Strike, result: Result) -> None:
    """Wait until the run is closed or waits for a person, take the fault away, wait again, and for the controller."""
    host, playing = strike.host, strike.playing
    assert playing is not None
    begun = time.monotonic()
    patience = 40.0 if (strike.step, result.fault) == ("lock", "hangs") else PATIENCE
    while time.monotonic() - begun < patience:
        if not _open(host) and (playing.poll() is not None or result.fault in ("hangs", "cut")):
            break
        if moments.begun(host.journal(), "restore", "failed") and playing.poll() is not None:
            break
        time.sleep(0.2)
    if _open(host):
        result.mended = bool(strike.undo)
        _mend(strike, result)
        if not host.wait_closed(200):
            code, out = host.play(RESTORE_BOOK, "-e", "hs_take_over=true")
            result.problems.append(f"did not come back by itself; restore.yml by hand: {code}: {_words(out)}")
    result.back = round(time.monotonic() - begun, 1)
    _mend(strike, result)
    try:
        result.code = playing.wait(240)
    except Exception:
        result.problems.append("the controller did not end")


def _open(host: FaultHost) -> bool:
    return any((host.disk(STATE) / name).exists() for name in ("journal.json", "lock"))


def _mend(strike: Strike, result: Result) -> None:
    while strike.undo:
        try:
            strike.undo.pop()()
        except Exception as error:
            result.notes.append(f"mending: {error}")


def _words(out: str) -> str:
    """What a playbook said of its failure, in short."""
    flat = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", out).split())
    at = flat.rfind("fatal: [")
    return flat[at : at + 400] if at >= 0 else flat[-300:]


def _judge(strike: Strike, fault: Fault, result: Result) -> None:
    """From outside, over ssh: production, source, files, processes, units, samples; the controller's word; restore.yml changes nothing."""
    host, problems = strike.host, result.problems
    if not result.struck:
        problems.append("the step was never seen at work")
    seen, before = host.look(90), host.before
    result.why, result.accepted = seen["closed"].get("why", ""), seen["samples"]["accepted"]
    if not str(seen["generates"]).startswith("["):
        problems.append(f"production: {seen['generates']}")
    for key in ("argv", "environment"):
        if seen["production"][key] != before["production"][key]:
            problems.append(f"production's {key} changed")
    _judge_tree(strike, seen["tree"], before["tree"], problems)
    for key, told in (("ours", "processes"), ("units", "units")):
        if seen[key]:
            problems.append(f"{told} left: {seen[key]}")
    stray = sorted(set(seen["state"]) - KEPT) + seen["backup"] + seen["samples"]["stray"]
    stray += sorted(name for name in set(seen["shm"]) - set(before["shm"]) if "hs" in name)
    if stray:
        problems.append(f"files left: {stray}")
    if seen["samples"]["wrong"]:
        problems.append(f"accepted samples that are wrong: {seen['samples']['wrong']}")
    _judge_code(strike, fault, result)
    code, out = host.play(RESTORE_BOOK, "-e", "hs_operator=matrix@controller")
    changed = re.findall(r"changed=(\d+)", out)
    if code != 0 or changed[-1:] != ["0"]:
        problems.append(f"restore.yml afterwards: status {code}, changed={changed[-1:]}: {_words(out)}")


def _judge_tree(strike: Strike, now: dict[str, str], before: dict[str, str], problems: list[str]) -> None:
    wanted = dict(before)
    if strike.expect_tree:
        text = (strike.host.tree / "root/var/tmp/pristine.py").read_bytes()
        text += b"# a note by a colleague\n" if strike.expect_tree == "edited" else b"# the next release\n"
        wanted["srt/models/deepseek_v2.py"] = hashlib.sha256(text).hexdigest()
    other = sorted(name for name in set(now) | set(wanted) if now.get(name) != wanted.get(name))
    if other:
        problems.append(f"the engine's files are not as they must be: {other[:5]}")


# starting it in another way need not extract
PARTIAL = ("tags", "start-at", "check")


def _judge_code(strike: Strike, fault: Fault, result: Result) -> None:
    """Status 0 if and only if the data set is complete; the second operator is told who holds the host."""
    complete = result.accepted == SAMPLES
    if result.code == 0 and not complete and fault.name not in PARTIAL:
        result.problems.append(f"status 0, but {result.accepted} of {SAMPLES} samples")
    if fault.name in ("cut 20 s", "second", "twice", "shm full", "GPU") and result.code != 0 and result.struck:
        # shm full and GPU: where the step can go on, it must
        (result.problems if fault.name in ("cut 20 s", "second", "twice") else result.notes).append(
            f"status {result.code}: {_words(strike.host.log.read_text())}"
        )
    elif result.code not in (0, None):
        result.notes.append(f"status {result.code}: {_words(strike.host.log.read_text())}")
    if fault.name == "check" and (result.code != 0 or result.accepted):
        result.problems.append(f"--check: status {result.code}, {result.accepted} samples")
    for book, other, log in strike.others:
        said = " ".join(log.read_text().split())
        if strike.step in FORWARD:
            if other.returncode != 2 or "matrix@controller" not in said:
                result.problems.append(f"the second operator's {book}: {other.returncode}: {_words(said)}")
        elif other.returncode not in (0, 2):
            result.problems.append(f"the second operator's {book}: {other.returncode}: {_words(said)}")


def named(step: str, fault: str) -> str:
    """How a cell is called on the command line."""
    return f"{step}:{fault}"


def all_cells() -> list[tuple[str, str]]:
    """Every cell that can be played, in diagonals: the first ones touch each step and each fault."""
    names = list(FAULTS)
    order = [
        (STEPS[(number + shift) % len(STEPS)], name) for shift in range(len(STEPS)) for number, name in enumerate(names)
    ]
    return [(step, name) for step, name in order if step not in FAULTS[name].instead]
