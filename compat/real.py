"""Real SGLang servers of every layout of deepseek_v2.py, judged by Hugging Face: `make compat-real`.

    python -m compat.real [--release 0.5.14 ...] [--tp 1 ...] [--mode fused ...] [--document docs/compatibility-real.md]

Each case starts a server on the CPU and takes half a minute or so. Exit 1 when one does not pass.

edit         the edit of the engine's source, undone to the byte afterwards
no-touch     no edit: the package in SGLANG_EXTERNAL_MODEL_PACKAGE, with production's own chained
own-capture  the edit, while the model hands out states of its own choice too, as it does for a drafter
fused        the edit, at tensor parallel 2, with the layers' sums left to the next layer's norm (all-reduce fusion)
naive        the same with the mistake that fusion invites, made on purpose: passes when the canary refuses it
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compat import real_case
from compat.real_case import Case, Outcome

MODES = ("edit", "no-touch", "own-capture", "fused", "naive")
SAMPLES, LONGEST = 16, 512  # of the local engine's data set; tokens


@dataclass(frozen=True)
class Release:
    """A release of SGLang that a CPU serves. imports: whether it knows SGLANG_EXTERNAL_MODEL_PACKAGE. ranks: tensor parallel sizes."""

    name: str
    layout: str
    imports: bool
    ranks: tuple[int, ...] = (1, 2)


RELEASES = (
    Release("0.4.10.post2", "A", False, (1,)),  # at 2 its own decode fails on a CPU
    Release("0.5.3.post3", "A", False),
    Release("0.5.10.post1", "B", True),
    Release("0.5.14", "C", True),
    Release("0.5.23", "D", True),
)


def cases() -> Iterator[Case]:
    """Every case there is; what a layout or release does not have is left out."""
    for release in RELEASES:
        for mode in MODES:
            for tp in release.ranks:
                if mode == "no-touch" and not release.imports:
                    continue
                if mode == "own-capture" and release.layout == "A":  # the model has none
                    continue
                if mode in ("fused", "naive") and tp == 1:  # nothing to sum
                    continue
                if mode == "naive" and release.layout not in "AB":  # the others give the state whole
                    continue
                yield Case(release.name, release.layout, tp, mode)


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(10240, 30000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def row(outcome: Outcome) -> list[str]:
    """The cells of a line of the table."""
    case = outcome.case
    states = [value for what, value in outcome.differences.items() if what.startswith("boundary")]
    shown = [f"{max(states):.1e}" if states else "-"]
    shown += [
        f"{outcome.differences[what]:.1e}" if what in outcome.differences else "-"
        for what in ("final pre-norm", "final_post_norm")
    ]
    said = outcome.proof if outcome.passed else "FAILED"
    return [case.release, case.layout, str(case.tp), case.mode, str(outcome.samples), *shown, said]


HEAD = ["release", "layout", "tp", "mode", "samples", "boundaries", "pre-norm", "post-norm", "and"]
WIDTHS = [13, 6, 2, 11, 7, 10, 8, 9, 0]


def document(outcomes: list[Outcome], place: Path) -> None:
    """Write the table as a page."""
    lines = [
        "# Real servers of every layout",
        "",
        "Made by `make compat-real`: a real SGLang server on the CPU for each line, started with what the project computes from production's",
        "command, read by the project's client, compared with Hugging Face's DeepseekV3 in float32. Figures are the largest absolute difference",
        f"over all samples and positions; {real_case.TOLERANCE:g} is allowed. `compat/real.py` says what the modes are.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(row(outcome)) + " |" for outcome in outcomes),
        "",
    ]
    place.write_text("\n".join(lines), encoding="utf-8")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Real SGLang servers of every layout, judged by Hugging Face.",
        epilog=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--release", action="append", choices=[release.name for release in RELEASES])
    parser.add_argument("--tp", action="append", type=int, choices=(1, 2))
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--work", type=Path, help="folder for engines, logs and samples, kept; else a temporary one")
    parser.add_argument(
        "--resume", action="store_true", help="with --work: leave out what passed there with this very code"
    )
    parser.add_argument("--document", type=Path, help="write the table to this page if all passed")
    options = parser.parse_args()
    chosen = [
        case
        for case in cases()
        if (not options.release or case.release in options.release)
        and (not options.tp or case.tp in options.tp)
        and (not options.mode or case.mode in options.mode)
    ]
    cache = Path(
        os.environ.get("HS_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-hidden-states"
    )
    with tempfile.TemporaryDirectory(prefix="compat-real-") as temporary:
        work = (options.work or Path(temporary)).absolute()
        work.mkdir(parents=True, exist_ok=True)
        outcomes = run_all(chosen, cache, work, options.resume)
    passed = sum(outcome.passed for outcome in outcomes)
    if options.document and chosen and passed == len(outcomes):
        document(outcomes, options.document)
    print(f"compat-real: {passed} of {len(outcomes)} servers")
    return 0 if outcomes and passed == len(outcomes) else 1


def code() -> str:
    """One hash over all that decides how a case comes out."""
    total = hashlib.sha256()
    folders = (
        "compat",
        "files/engine",
        "module_utils",
        "roles/local_engine",
        "roles/backup_and_patch/vars",
        "templates",
    )
    for folder in (*folders, "tests/engine/hf_reference.py"):
        place = real_case.REPO / folder
        for path in sorted(place.rglob("*") if place.is_dir() else [place]):
            if path.suffix in (".py", ".yml", ".j2", ".txt"):
                total.update(str(path.relative_to(real_case.REPO)).encode() + path.read_bytes())
    return total.hexdigest()


def kept(case: Case, place: Path, of_code: str) -> Outcome | None:
    """The outcome in ``place``, if the case passed there with the same code."""
    try:
        record = json.loads(place.read_text())
    except (OSError, ValueError):
        return None
    outcome = Outcome(case, **record["outcome"])
    return outcome if record["code"] == of_code and outcome.passed else None


def run_all(chosen: list[Case], cache: Path, work: Path, resume: bool = False) -> list[Outcome]:
    """One case after the other, each printed when it is over and written down in its folder."""
    outcomes: list[Outcome] = []
    built: set[str] = set()
    of_code = code()
    print(" ".join(f"{word:{width}}" for word, width in zip(HEAD, WIDTHS, strict=True)), flush=True)
    for case in chosen:
        folder = work / case.release
        record = folder / case.name / "outcome.json"
        before = kept(case, record, of_code) if resume else None
        try:
            if before is None and case.release not in built:
                real_case.make_engine(case.release, cache, folder)
                built.add(case.release)
                real_case.short_dataset(cache / "engine/dataset.jsonl", folder / "dataset.jsonl", SAMPLES, LONGEST)
            outcome = before or real_case.run(case, cache, folder, folder / "dataset.jsonl", free_port())
        except real_case.Failed as error:
            outcome = Outcome(case, trouble=str(error))
        outcomes.append(outcome)
        if before is None:
            facts = {key: value for key, value in dataclasses.asdict(outcome).items() if key != "case"}
            record.parent.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps({"code": of_code, "outcome": facts}, indent=1) + "\n")
        cells = " ".join(f"{word:{width}}" for word, width in zip(row(outcome), WIDTHS, strict=True))
        print(f"{cells}  ({outcome.seconds:.0f} s)", flush=True)
        if outcome.trouble:
            print(f"    {outcome.trouble}", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
