"""One cell of the matrix: a run, one fault at one step, and what is seen from outside when it is over."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
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
    "hs_controller_patience": 45,
    "hs_link_patience": 45,
    "hs_stop_timeout": 10,
    "hs_launch_timeout": 240,
    "hs_production_timeout": 240,
}
PATIENCE = 700.0  # for a run to be closed after the blow; leases are shorter
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
    host.inside(f"rm -rf {STATE}/backup/stale")
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


def play(host: FaultHost, *plan: tuple[str, Fault]) -> Result:
    """Play a run with these faults, each at its step, in the order in which the steps come; judge it."""
    make_ready(host)
    host.known = host.runs()
    result = Result(", ".join(step for step, _ in plan), ", ".join(fault.name for _, fault in plan))
    strikes = [Strike(host, step, fault.name) for step, fault in plan]
    settings = {key: word for _, fault in plan for key, word in fault.settings.items()}
    host.settings = ["-e", json.dumps({**SETTINGS, **settings})]
    playing = None
    try:
        own_play = plan[0][1].own_play
        book, words = own_play(strikes[0]) if own_play else (EXTRACT, ())
        if plan[0] == ("lock", FAULTS["fails"]):
            plan[0][1].setup(strikes[0])  # type: ignore[misc]
        playing = host.begin(book, *words, *host.settings)
        result.struck = True if own_play else _strike(strikes, plan, playing)
        _over(strikes, playing, result)
    finally:
        _mend(strikes, result)
        if playing is not None and playing.poll() is None:
            os.killpg(playing.pid, signal.SIGKILL)
            playing.wait()
    _judge(strikes, result)
    return result


def _strike(strikes: list[Strike], plan: tuple[tuple[str, Fault], ...], playing: subprocess.Popen[bytes]) -> bool:
    """Each fault at its moment; whether all the moments came."""

    def still() -> bool:
        return playing.poll() is None

    for number, (strike, (step, fault)) in enumerate(zip(strikes, plan, strict=True)):
        strike.playing = playing
        if fault.setup is not None and step != "lock":
            earlier = "extract" if step in RESTORE else STEPS[STEPS.index(step) - 1]
            # after another fault that step may never come: then at once
            if number or moments.wait(strike.host, earlier, still):
                fault.setup(strike)
        if (step, fault.name) == ("lock", "fails"):
            continue  # the guard comes before the lock: its setup is all
        if not moments.wait(strike.host, step, still):
            return False
        fault.strike(strike)
    return True


def _over(strikes: list[Strike], playing: subprocess.Popen[bytes], result: Result) -> None:
    """Wait until the run is closed or waits for a person, take the faults away, wait again, and for the controller."""
    host, names = strikes[0].host, [strike.fault for strike in strikes]
    begun = time.monotonic()
    # before the journal is there, no lease runs out
    patience = 40.0 if (strikes[0].step, names[0]) == ("lock", "hangs") else PATIENCE
    while time.monotonic() - begun < patience:
        if not _open(host) and (playing.poll() is not None or "hangs" in names or "cut" in names):
            break
        if moments.begun(host.journal(), "restore", "failed") and playing.poll() is not None:
            break
        time.sleep(0.2)
    if _open(host):
        result.mended = any(strike.undo for strike in strikes)
        _mend(strikes, result)
        if not host.wait_closed(200):
            code, out = host.play(RESTORE_BOOK, "-e", "hs_take_over=true")
            result.problems.append(f"did not come back by itself; restore.yml by hand: {code}: {_words(out)}")
    result.back = round(time.monotonic() - begun, 1)
    _mend(strikes, result)
    try:
        result.code = playing.wait(240)
    except subprocess.TimeoutExpired:
        result.problems.append("the controller did not end")


def _open(host: FaultHost) -> bool:
    return any((host.disk(STATE) / name).exists() for name in ("journal.json", "lock"))


def _mend(strikes: list[Strike], result: Result) -> None:
    for strike in strikes:
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


def _judge(strikes: list[Strike], result: Result) -> None:
    """From outside, over ssh: production, source, files, processes, units, samples; the controller's word; restore.yml changes nothing."""
    host, problems = strikes[0].host, result.problems
    if not result.struck:
        problems.append("the step was never seen at work")
    seen, before = host.look(90), host.before
    result.why, result.accepted = seen["closed"].get("why", ""), seen["samples"]["accepted"]
    if not str(seen["generates"]).startswith("["):
        problems.append(f"production: {seen['generates']}")
    for key in ("argv", "environment"):
        if seen["production"][key] != before["production"][key]:
            problems.append(f"production's {key} changed")
    _judge_tree(host, [strike.expect_tree for strike in strikes], seen["tree"], before["tree"], problems)
    for key, told in (("ours", "processes"), ("units", "units")):
        if seen[key]:
            problems.append(f"{told} left: {seen[key]}")
    # of a file that was upgraded meanwhile the backup is set aside, not removed: it is nobody else's to choose
    backup = [name for name in seen["backup"] if name != "stale" or all(s.expect_tree != "upgraded" for s in strikes)]
    stray = sorted(set(seen["state"]) - KEPT) + backup + seen["samples"]["stray"]
    stray += sorted(name for name in set(seen["shm"]) - set(before["shm"]) if name.startswith("sglang_hs"))
    if stray:
        problems.append(f"files left: {stray}")
    if seen["samples"]["wrong"]:
        problems.append(f"accepted samples that are wrong: {seen['samples']['wrong']}")
    _judge_code(strikes, result)
    code, out = host.play(RESTORE_BOOK, "-e", "hs_operator=matrix@controller")
    changed = re.findall(r"changed=(\d+)", out)
    if code != 0 or changed[-1:] != ["0"]:
        problems.append(f"restore.yml afterwards: status {code}, changed={changed[-1:]}: {_words(out)}")


def _judge_tree(
    host: FaultHost, expected: list[str], now: dict[str, str], before: dict[str, str], problems: list[str]
) -> None:
    wanted = dict(before)
    for change in filter(None, expected):
        text = (host.tree / "root/var/tmp/pristine.py").read_bytes()
        text += b"# a note by a colleague\n" if change == "edited" else b"# the next release\n"
        wanted["srt/models/deepseek_v2.py"] = hashlib.sha256(text).hexdigest()
    other = sorted(name for name in set(now) | set(wanted) if now.get(name) != wanted.get(name))
    if other:
        problems.append(f"the engine's files are not as they must be: {other[:5]}")


PARTIAL = {"tags", "start-at", "check"}  # starting it in another way need not extract
HARMLESS = {"cut 20 s", "second", "twice"}  # the run goes on to its good end


def _judge_code(strikes: list[Strike], result: Result) -> None:
    """Status 0 if and only if the data set is complete; the second operator is told who holds the host."""
    names = {strike.fault for strike in strikes}
    said = _words(strikes[0].host.log.read_text())
    if result.code == 0 and result.accepted != SAMPLES and not names & PARTIAL:
        result.problems.append(f"status 0, but {result.accepted} of {SAMPLES} samples")
    if result.code not in (0, None) and result.struck:
        (result.problems if names <= HARMLESS else result.notes).append(f"status {result.code}: {said}")
    if "check" in names and (result.code != 0 or result.accepted):
        result.problems.append(f"--check: status {result.code}, {result.accepted} samples: {said}")
    for strike in strikes:
        for book, other, log in strike.others:
            told = " ".join(log.read_text().split())
            refused = other.returncode == 2 and "matrix@controller" in told
            # on a busy machine the run may be over before his second playbook; his first must have met it
            came_late = book == RESTORE_BOOK and other.returncode == 0 and "no run is open" in told
            if not (refused or came_late) and (strike.step in FORWARD or other.returncode not in (0, 2)):
                result.problems.append(f"the second operator's {book}: {other.returncode}: {_words(told)}")


# the controller is not there any more when the restore comes, or not in time
GONE = {"SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "cut", "window"}
CONTROLLER = {"SIGINT", "SIGTERM", "SIGHUP", "SIGKILL", "cut", "cut 20 s"}
APART = {"reboot", "tags", "start-at", "check", "twice"}
ONE_OF = (
    {"GPU", "port"},
    {"by hand", "upgraded"},
    {"shm full", "output full", "state full"},
)  # they meet in what they leave


def together(first: tuple[str, str], then: tuple[str, str]) -> bool:
    """Whether a fault on the way and one in the restore can be played in one run, each still being what it is by itself.

    Two faults are harder on the restore than one: if the run is green both cells are; if it is not, they are played apart.
    """
    (step, fault), (later, other) = first, then
    if fault in APART or other in APART - {"reboot"} or fault == other or later not in RESTORE:
        return False
    if step not in ("launch", "canary", "extract") and not (fault in HARMLESS and step in FORWARD):
        return False
    return not (fault in GONE and other in CONTROLLER) and not any({fault, other} <= pair for pair in ONE_OF)


def paired(cells: list[tuple[str, str]]) -> list[tuple[tuple[str, str], ...]]:
    """The cells as runs of one or two, each cell once, in their order."""
    left = list(cells)
    runs: list[tuple[tuple[str, str], ...]] = []
    while left:
        first = left.pop(0)
        partner = next((cell for cell in left if together(first, cell) or together(cell, first)), None)
        if partner is None:
            runs.append((first,))
            continue
        left.remove(partner)
        runs.append((first, partner) if together(first, partner) else (partner, first))
    return runs


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
