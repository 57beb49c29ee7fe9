"""One real server: an engine of some release, the capture, the client over a data set, the judge, and no trace left.

All that matters is the project's own: the edit and its undoing, the extraction's command and environment, the capture, the
client. What stands for production is what inventory/local starts by hand; its command is read off that script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "module_utils"))

from sglang_hs import command, ending, engine, model, procs, server, source_edit, steps  # noqa: E402

BOUNDARIES = [1, 2, 4]
TOLERANCE = 1e-4  # float32, largest absolute difference to Hugging Face
LIBRARY = f"{REPO / 'files/engine'}:{REPO / 'module_utils'}"
PACKAGES = REPO / "compat/real_packages"
EXTRA = {"own-capture": "hs_compat_own", "fused": "hs_compat_fused", "naive": "hs_compat_naive"}
LAUNCH_PATIENCE = 240.0  # seconds


@dataclass(frozen=True)
class Case:
    """A server to be started. mode: edit, no-touch, own-capture, fused or naive."""

    release: str
    layout: str
    tp: int
    mode: str

    @property
    def name(self) -> str:
        """For folders and people."""
        return f"{self.release}-tp{self.tp}-{self.mode}"


@dataclass
class Outcome:
    """What came of a case: differences to Hugging Face by state, samples compared, what the mode proved; trouble if it failed."""

    case: Case
    differences: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    proof: str = ""
    trouble: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every state was compared, equal, and all proofs held."""
        return not self.trouble


class Failed(Exception):
    """A case failed; the text says where and why."""


def make_engine(release: str, cache: Path, folder: Path) -> None:
    """Build what inventory/local builds for this release: cache, private copy of the engine, production's script."""
    env = {**os.environ, "HS_CACHE": str(cache), "HS_LOCAL_DIR": str(folder), "HS_LOCAL_RELEASE": release}
    env = {key: word for key, word in env.items() if not key.startswith(("MAKE", "MFLAGS"))}
    env["ANSIBLE_CONFIG"] = str(REPO / "ansible.cfg")
    book = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        "playbooks/local_engine.yml",
        "-i",
        "inventory/local",
    ]
    done = subprocess.run(book, cwd=REPO, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"the engine was not built: {done.stdout[-1500:]}{done.stderr[-500:]}")


def production(folder: Path, tp: int) -> tuple[list[str], dict[str, str]]:
    """(argv, environment) that production.sh would start: the script runs up to its `exec`, which prints instead."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    show = 'exec() { printf "%s\\0" "$@" "=="; env -0; }; . "$0"'
    done = subprocess.run(
        ["bash", "-c", show, str(folder / "production.sh")], env=clean, stdout=subprocess.PIPE, check=True
    )
    words, environment = done.stdout.decode().split("==\0", 1)
    argv = words.split("\0")[:-1]
    env = dict(entry.split("=", 1) for entry in environment.split("\0") if "=" in entry)
    for name in ("_", "PWD", "OLDPWD", "SHLVL"):
        env.pop(name, None)
    if tp > 1:
        argv += ["--tp-size", str(tp)]
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    return argv, env


def short_dataset(dataset: Path, place: Path, count: int, longest: int) -> None:
    """The first ``count`` samples of at most ``longest`` tokens."""
    lines = [line for line in dataset.read_text().splitlines() if len(json.loads(line)["input_ids"]) <= longest]
    place.write_text("".join(line + "\n" for line in lines[:count]))


def run(case: Case, cache: Path, folder: Path, dataset: Path, port: int) -> Outcome:
    """Run a case in ``folder`` (its release's, with the private engine in it); never raises for what a server does."""
    outcome, begin = Outcome(case), time.monotonic()
    work = folder / case.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        _run(case, outcome, cache, folder, work, dataset, port)
    except (Failed, engine.HsError, OSError, subprocess.SubprocessError) as error:
        outcome.trouble = str(error)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _run(case: Case, outcome: Outcome, cache: Path, folder: Path, work: Path, dataset: Path, port: int) -> None:
    argv, env = production(folder, case.tp)
    python = str(folder / "engine/bin/python")
    installed = engine.describe(python, env, str(folder))
    if installed["release"] != case.release:
        raise Failed(f"the engine is {installed['release']}")
    if case.mode in EXTRA:
        env["SGL_CPU_EXTRA"] = EXTRA[case.mode]  # the stand-ins import it after the engine's own modules
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{PACKAGES}"
        env["HS_COMPAT_PROOF"] = str(work / "proof-{rank}.json")
    source = Path(installed["model_file"])
    before, mtime = source.read_bytes(), source.stat().st_mtime_ns
    if case.mode != "no-touch":
        _edit(case, source, work)
        if source.read_bytes() == before:
            raise Failed("the edit changed nothing")
    try:
        refusal = _serve(case, argv, env, installed, work, dataset, port)
    finally:
        if case.mode != "no-touch":
            source_edit.undo(str(source), str(work / "backup"))
    if source.read_bytes() != before or source.stat().st_mtime_ns != mtime:
        raise Failed("the source is not what it was")
    if case.mode == "naive":
        if "partial sum" not in refusal:
            raise Failed(f"the canary did not refuse a naive sum: {refusal or 'the client took it'}")
        outcome.proof = "refused as it must be: " + refusal.split("refuses: ")[-1].split(". That")[0]
        return
    if refusal:
        raise Failed(refusal)
    judge(outcome, cache, argv, work, dataset)
    _prove(case, outcome, work)


def _edit(case: Case, source: Path, work: Path) -> None:
    declared = yaml.safe_load((REPO / "roles/backup_and_patch/vars/main.yml").read_text())
    variants = declared["backup_and_patch_variants"]
    todo = source_edit.plan(str(source), variants, str(work / "backup"))
    result = source_edit.apply(todo)
    if result["variant"] != case.layout:
        raise Failed(f"the edit took layout {result['variant']} for {case.layout}")


def _serve(
    case: Case,
    argv: list[str],
    env: dict[str, str],
    installed: dict[str, Any],
    work: Path,
    dataset: Path,
    port: int,
) -> str:
    """Start the extraction server, wait until it is attached and generates, run the client, end the server.

    Returns why the client did not complete, "" where it did.
    """
    flags = engine.Flags(installed, env, str(work), None)
    known = flags.result()
    extra = ["--enable-flashinfer-allreduce-fusion"] if case.mode in ("fused", "naive") and case.layout == "A" else []
    line = command.extraction(argv, known, port, "torch_native", extra=extra)
    dumps = Path(f"/dev/shm/hs_compat_{port}_{os.getpid()}")
    settings = {
        "extraction_env": {},
        "dump_dir": str(dumps),
        "boundaries": BOUNDARIES,
        "final": "both",
        "no_touch": case.mode == "no-touch",
    }
    own = {**command.inherited(env), **command.environment(settings, LIBRARY, env)}
    steps.dump_folder(dumps, os.geteuid(), os.getegid())
    log = work / "server.log"
    (work / "command.json").write_text(json.dumps({"argv": line, "env": own}, indent=1))
    try:
        with log.open("wb") as handle:
            process = subprocess.Popen(
                line,
                env=own,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                start_new_session=True,
            )
        try:
            _wait(process, dumps, case.tp, f"http://127.0.0.1:{port}", log)
            return _client(case, line, own, installed, dumps, work, dataset, port)
        finally:
            procs.end(procs.family(process.pid), 20)
            process.wait()
    finally:
        steps.clear_dumps(dumps)


def _wait(process: subprocess.Popen[bytes], dumps: Path, ranks: int, url: str, log: Path) -> None:
    until = time.monotonic() + LAUNCH_PATIENCE
    while True:
        for refused in (dumps / "attached").glob("refused-*.json"):
            raise Failed(f"the capture refused: {json.loads(refused.read_text())['reason']}")
        if process.poll() is not None:
            raise Failed(
                f"the server ended with status {process.returncode}: {ending.why_ended(log, process.returncode)}; log: {log}"
            )
        if len(list((dumps / "attached").glob("rank*.json"))) == ranks and server.healthy(url, timeout=60) is None:
            return
        if time.monotonic() > until:
            raise Failed(f"the server was not ready within {LAUNCH_PATIENCE:.0f} s; log: {log}")
        time.sleep(0.3)


def _client(
    case: Case,
    line: list[str],
    own: dict[str, str],
    installed: dict[str, Any],
    dumps: Path,
    work: Path,
    dataset: Path,
    port: int,
) -> str:
    """The project's client, canary first, then the data: why it did not complete, "" where it did."""
    described = model.describe(command.model_path(line) or "", "float32")
    attached = json.loads((dumps / "attached/rank0.json").read_text())
    if attached["layout"] != case.layout:
        raise Failed(f"the capture took layout {attached['layout']} for {case.layout}")
    spec = {
        "run_dir": str(work / "run"),
        "server": f"http://127.0.0.1:{port}",
        "dataset": str(dataset),
        "output_dir": str(work / "samples"),
        "dump_dir": str(dumps),
        "boundaries": BOUNDARIES,
        "final": "both",
        "model_path": described["path"],
        "hidden_size": described["hidden_size"],
        "vocab_size": described["vocab_size"],
        "max_prompt": 4096,
        "canary": {"sequences": 2, "positions": 32},
        "provenance": {"engine": installed, "model": described},
    }
    (work / "spec.json").write_text(json.dumps(spec))
    env = {**own, "CUDA_VISIBLE_DEVICES": ""}
    env.pop("SGLANG_HS_DUMP_DIR")
    words = [str(installed["executable"]), "-m", "sglang_hs_client", "run", "--spec", str(work / "spec.json")]
    done = subprocess.run(words, env=env, cwd=work, capture_output=True, text=True, timeout=300)
    (work / "client.log").write_text(done.stdout + done.stderr)
    if done.returncode:
        return f"the client ended with status {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
    return ""


def judge(outcome: Outcome, cache: Path, argv: list[str], work: Path, dataset: Path) -> None:
    """Compare every sample with Hugging Face's states, in the environment's own Python; Failed where one differs.

    ``argv``: names the model. Fills the outcome's differences and number of samples.
    """
    words = [str(cache / "engine/venv/bin/python"), str(REPO / "tests/engine/hf_reference.py")]
    words += ["--model", command.model_path(argv) or "", "--dataset", str(dataset), "--output", str(work / "samples")]
    words += ["--tolerance", str(TOLERANCE)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    for what, number in re.findall(r"^(boundary \d+|final pre-norm|final_post_norm) +(\S+)$", done.stdout, re.M):
        outcome.differences[what] = float(number)
    found = re.search(r"^(\d+) samples, max abs", done.stdout, re.M)
    outcome.samples = int(found.group(1)) if found else 0
    if done.returncode or len(outcome.differences) != len(BOUNDARIES) + 2:
        raise Failed(f"not Hugging Face's states: {(done.stdout + done.stderr)[-600:]}")


def _prove(case: Case, outcome: Outcome, work: Path) -> None:
    """What the mode must have shown, from the ranks themselves."""
    if case.mode not in ("own-capture", "fused"):
        outcome.proof = "source untouched" if case.mode == "no-touch" else "source back to the byte"
        return
    proofs = [json.loads(path.read_text()) for path in sorted(work.glob("proof-*.json"))]
    if len(proofs) != case.tp:
        raise Failed(f"{len(proofs)} of {case.tp} ranks tell of {case.mode}")
    if case.mode == "own-capture":
        if min(proof["forwards"] for proof in proofs) < 1 or any(proof["states"] < 1 for proof in proofs):
            raise Failed(f"the model's own capture was not at work: {proofs}")
        outcome.proof = f"the model returned its own states in {proofs[0]['forwards']} forwards"
        return
    off = min(proof["naive_off"] for proof in proofs)
    if off < 0.1:
        raise Failed(f"no fusion: the layers' sums were whole ({proofs})")
    outcome.proof = f"{proofs[0]['sums']} deferred sums; hidden_states + residual off by {off:.2f}"
