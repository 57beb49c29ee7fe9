"""A bench for breaking things: one real extraction server without Ansible, and the real client against it.

Nothing here is a stand-in. Command and environment are computed by the project from the local production's own
(``templates/local_production.sh.j2``), the edit is made in a private copy of the engine, capture and client are the shipped ones,
copied. Server and client are plain processes, so that a test may kill, stop or starve each at any moment.
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import yaml
from local_host import CACHE, REPO, Host, free_ports
from sglang_hs import command, engine, model, procs, server, source_edit, steps
from sglang_hs.manifest import Manifest

PYTHON = CACHE / "engine/venv/bin/python"
MODEL = CACHE / "engine/model"
BOUNDARIES = (1, 2, 4)
FORK = "1"  # the engine's processes by fork: half of a start's processor time (standins/_forked.py); "" as the engine has them
TOLERANCE = 1e-5  # between two passes that are not equal to the bit


def private_engine(folder: Path) -> Path:
    """A private copy of the engine with the project's edit in it; the Python that runs it."""
    if not (CACHE / "engine/venv/pins.sha256").is_file():
        built = Host(folder, 1)
        (folder / "home").mkdir()
        assert built.play("local_engine").code == 0
    words = [str(PYTHON), str(REPO / "roles/local_engine/files/tools/engine_copy.py"), str(folder / "engine")]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    source = next((folder / "engine").glob("lib/python3*/site-packages/sglang/srt/models/deepseek_v2.py"))
    variants = yaml.safe_load((REPO / "roles/backup_and_patch/vars/main.yml").read_text())["backup_and_patch_variants"]
    (folder / "backup").mkdir()
    source_edit.apply(source_edit.plan(str(source), variants, str(folder / "backup")))
    return folder / "engine/bin/python"


def install(folder: Path) -> Path:
    """The code that a run installs on a host, copied to ``folder``."""
    for package in ("files/engine/sglang_hs_capture", "files/engine/sglang_hs_client", "module_utils/sglang_hs"):
        name = Path(package).name
        shutil.copytree(REPO / package, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def production(folder: Path, python: Path, port: int, tp: int) -> tuple[list[str], dict[str, str]]:
    """(argv, environment) of the local production, out of the script that starts it by hand."""
    frame = jinja2.Environment(autoescape=False, undefined=jinja2.StrictUndefined)
    frame.filters["quote"] = shlex.quote
    script = frame.from_string((REPO / "templates/local_production.sh.j2").read_text()).render(
        local_engine_cache=str(CACHE),
        local_engine_instance=str(python.parent.parent),
        local_engine_python_path=str(CACHE / "engine/standins"),
        local_engine_model=str(MODEL),
        local_dir=str(folder),
        local_port=port,
        local_tp=tp,
    )
    env = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    env["SGL_CPU_FORK"] = FORK
    argv: list[str] = []
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            env.update(dict(word.split("=", 1) for word in words[1:]))
        elif words[:1] == ["exec"]:
            argv = words[1:]
    return argv, env


@functools.lru_cache
def known_flags(python: Path) -> frozenset[str]:
    """The options that the engine itself says it knows; asked once."""
    _, env = production(python.parent, python, 1, 1)
    return frozenset(engine.Flags(engine.describe(str(python), env, "/"), env, "/", None).result())


def write_dataset(path: Path, count: int, shortest: int, longest: int, twins: int = 2) -> int:
    """``count`` rows by the local engine's own tool, the last ``twins`` of them equal to the first ones. Returns ``count``."""
    tool = REPO / "roles/local_engine/files/tools/make_dataset.py"
    sizes = ["--count", str(count - twins), "--shortest", str(shortest), "--longest", str(longest)]
    subprocess.run(
        [sys.executable, str(tool), str(path), "--model", str(MODEL), *sizes], check=True, stdout=subprocess.DEVNULL
    )
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines + lines[:twins]))
    return count


@dataclass
class Ended:
    """How a client ended: exit code, result.json ({} where it wrote none), what it printed."""

    code: int
    result: dict[str, Any]
    out: str

    @property
    def message(self) -> str:
        return str(self.result.get("message", self.out))


@dataclass
class Rig:
    """``python``: of a patched copy of the engine. ``lib``: folder with capture and client. ``drop``, ``extra``: changes to the
    computed command, for faults of the launch itself."""

    folder: Path
    python: Path
    lib: Path
    tp: int = 1
    boundaries: tuple[int, ...] = BOUNDARIES
    drop: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    final: str = "pre_norm"
    count: int = 0
    port: int = field(default_factory=free_ports)
    process: procs.Process | None = None
    output: Path = Path()  # folder/out unless set
    launcher: Callable[..., Any] | None = None  # what starts a client instead of :meth:`python_m`

    def __post_init__(self) -> None:
        self.output = self.output if self.output.name else self.folder / "out"

    # -- the server ----------------------------------------------------------------------------------------------------

    @property
    def dumps(self) -> Path:
        return Path(f"/dev/shm/sglang_hs_rig_{self.port}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def start(self, fresh: bool = True) -> None:
        """Start the server and return; ``fresh``: with an emptied dump folder, as a launch does."""
        argv, env = production(self.folder, self.python, self.port, self.tp)
        words = command.extraction(argv, set(known_flags(self.python)), self.port + 1, "torch_native")
        words = [word for word in words if word not in self.drop] + list(self.extra)
        settings = {"dump_dir": self.dumps, "boundaries": self.boundaries, "final": self.final}
        env.update(command.environment(settings, str(self.lib), env))
        if fresh:
            steps.dump_folder(self.dumps, os.geteuid(), os.getegid())
        else:  # so that wait_ready sees the new ranks only
            shutil.rmtree(self.dumps / "attached", ignore_errors=True)
        with open(self.log, "ab") as log:
            started = subprocess.Popen(
                words,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.process = procs.read(started.pid)

    def wait_ready(self, patience: float = 240) -> None:
        """Until every rank's capture is attached and tokens come back."""
        until = time.monotonic() + patience
        while time.monotonic() < until:
            assert self.process is not None and self.alive(), f"the server ended: {self.log.read_text()[-3000:]}"
            ranks = list((self.dumps / "attached").glob("rank*.json"))
            if len(ranks) == self.tp and server.healthy(self.url, timeout=60) is None:
                return
            time.sleep(0.1)
        raise AssertionError(f"the server is not ready: {self.log.read_text()[-3000:]}")

    def alive(self) -> bool:
        """Whether the server's main process runs."""
        if self.process is None:
            return False
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process.pid, os.WNOHANG)  # a dead child of ours is a zombie until somebody looks
        return procs.alive(self.process.pid, self.process.start)

    def family(self) -> list[procs.Process]:
        return procs.family(self.process.pid) if self.process else []

    def scheduler(self, rank: int = 0) -> procs.Process:
        """The process that runs the model (of tensor-parallel ``rank``): the one that reported its capture."""
        found = procs.read(json.loads((self.dumps / f"attached/rank{rank}.json").read_text())["pid"])
        assert found is not None
        return found

    def kill_server(self) -> None:
        """SIGKILL to all its processes at once."""
        for process in self.family():
            procs.signal_process(process, signal.SIGKILL)
        self.wait_gone()

    def wait_gone(self, patience: float = 60) -> None:
        """Until the server's port is free and its main process gone; whatever it left behind is ended."""
        left = self.family()
        until = time.monotonic() + patience
        while self.alive() and time.monotonic() < until:
            left = self.family() or left
            time.sleep(0.05)
        for process in left:
            procs.signal_process(process, signal.SIGKILL)
        while not procs.port_free(self.port + 1) and time.monotonic() < until:
            time.sleep(0.05)
        assert procs.port_free(self.port + 1)
        self.process = None

    def stop(self) -> None:
        """End the server as the project does and clear the dump folder."""
        procs.end(self.family(), 3)  # nothing of it is wanted any more
        self.process = None
        steps.clear_dumps(self.dumps)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Rig]:
        """Started and ready; ended on the way out."""
        self.start()
        try:
            self.wait_ready()
            yield self
        finally:
            self.stop()

    # -- the client ----------------------------------------------------------------------------------------------------

    @property
    def dataset(self) -> Path:
        return self.folder / "data.jsonl"

    def spec(self, **changes: Any) -> dict[str, Any]:
        """The client's specification, quick to lose patience."""
        described = model.describe(str(MODEL), "float32")
        document: dict[str, Any] = {
            "server": self.url,
            "dataset": str(self.dataset),
            "output_dir": str(self.output),
            "dump_dir": str(self.dumps),
            "run_dir": str(self.folder / "run"),
            "boundaries": list(self.boundaries),
            "final": self.final,
            "in_flight": 3,
            "retries": 2,
            "request_timeout_s": 60,
            "dump_wait_s": 20,
            "outage_s": 2,
            "canary": {"sequences": 1, "positions": 16},
            "model_path": str(MODEL),
            "hidden_size": described["hidden_size"],
            "vocab_size": described["vocab_size"],
            "max_prompt": 2048,
            "run_id": "rig",
        }
        return {**document, **changes}

    def begin(self, **changes: Any) -> subprocess.Popen[str]:
        """Start a client and go on."""
        document = self.spec(**changes)
        run = Path(document["run_dir"])
        run.mkdir(parents=True, exist_ok=True)
        for name in ("progress.json", "result.json"):
            with contextlib.suppress(FileNotFoundError):
                (run / name).unlink()
        (run / "spec.json").write_text(json.dumps(document))
        launch = self.launcher or self.python_m
        return launch("sglang_hs_client", "run", "--spec", str(run / "spec.json"))

    def client_env(self) -> dict[str, str]:
        """The environment that the project gives the client."""
        _, env = production(self.folder, self.python, self.port, self.tp)
        return {**env, "PYTHONPATH": f"{self.lib}:{env['PYTHONPATH']}", "PYTHONUNBUFFERED": "1"}

    def python_m(self, *words: str) -> subprocess.Popen[str]:
        """``python -m`` in the engine's Python, as the project runs the client there."""
        return subprocess.Popen(
            [str(self.python), "-m", *words],
            cwd=self.folder,
            env=self.client_env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end(self, client: subprocess.Popen[str], run_dir: Path | None = None, patience: float = 120) -> Ended:
        """Wait for a client's own end."""
        try:
            out, _ = client.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            client.kill()
            raise
        file = (run_dir or self.folder / "run") / "result.json"
        return Ended(client.returncode, json.loads(file.read_text()) if file.exists() else {}, out)

    def run(self, **changes: Any) -> Ended:
        """One client, from start to end."""
        client = self.begin(**changes)
        return self.end(client, Path(changes["run_dir"]) if "run_dir" in changes else None)

    def wait_begun(self, client: subprocess.Popen[str], patience: float = 60) -> None:
        """Until the client's imports are over and its work begins."""
        self.wait_for(client, (self.folder / "run/progress.json").exists, patience)

    def wait_accepted(self, client: subprocess.Popen[str], count: int, patience: float = 60) -> None:
        """Until ``count`` samples are in place, and the client still runs."""
        self.wait_for(client, lambda: len(self.files()) >= count, patience)

    def wait_for(self, client: subprocess.Popen[str], seen: Callable[[], bool], patience: float = 60) -> None:
        """Until ``seen()`` is true while the client runs; AssertionError where it ends before."""
        until = time.monotonic() + patience
        while not seen():
            assert client.poll() is None, self.end(client)
            assert time.monotonic() < until, "not seen in time"
            time.sleep(0.002)

    # -- what came out -------------------------------------------------------------------------------------------------

    def files(self) -> list[str]:
        """Names in the folder of accepted samples."""
        folder = self.output / "hidden_states"
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def forget(self) -> None:
        """Remove the output folder and the run's."""
        for folder in (self.output, self.folder / "run"):
            shutil.rmtree(folder, ignore_errors=True)

    def equals_hugging_face(self, tolerance: float = 1e-4) -> str:
        """Compare the output with Hugging Face's states in float32; what the judge printed."""
        words = [str(PYTHON), str(REPO / "tests/engine/hf_reference.py"), "--model", str(MODEL)]
        words += ["--dataset", str(self.dataset), "--output", str(self.output), "--tolerance", str(tolerance)]
        done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip().splitlines()[-1]

    def keep_reference(self) -> None:
        """The output of a pass without faults becomes what others are compared with."""
        shutil.rmtree(self.folder / "reference", ignore_errors=True)
        shutil.move(self.output, self.folder / "reference")

    def check_complete(self) -> None:
        """Every sample is there once and equal to the reference; book and files agree; nothing else is left anywhere."""
        names = [f"hs_{idx}.safetensors" for idx in range(self.count)]
        assert self.files() == sorted(names), self.files()
        book = Manifest(self.output, read_only=True)
        try:
            assert book.counts()["done"] == book.counts()["total"] == self.count, book.counts()
            for sample in book.samples():
                assert sample.file == f"hidden_states/{names[sample.idx]}"
                data = (self.output / sample.file).read_bytes()
                assert len(data) == sample.bytes and hashlib.sha256(data).hexdigest() == sample.sha256, sample
                self.check_accepted(names[sample.idx])
        finally:
            book.close()
        lines = [json.loads(line) for line in (self.output / "samples.jsonl").read_text().splitlines()]
        assert [line["idx"] for line in lines] == list(range(self.count))
        assert json.loads((self.output / "manifest.json").read_text())["complete"] is True
        self.check_no_leftovers()

    def check_accepted(self, name: str) -> None:
        """One sample in its final place equals the reference."""
        found, wanted = (place / "hidden_states" / name for place in (self.output, self.folder / "reference"))
        equal_states(found.read_bytes(), wanted.read_bytes(), name)

    def check_no_leftovers(self) -> None:
        """Nothing half-written, no wish, no dump, no quarantine."""
        known = {".lock", "hidden_states", "quarantine", "manifest.sqlite", "manifest.json", "samples.jsonl"}
        known |= {"data-00000-of-00001.arrow", "dataset_info.json", "state.json"}
        assert set(os.listdir(self.output)) <= known, os.listdir(self.output)
        assert os.listdir(self.output / "quarantine") == []
        for name in ("want", "done", "used", "failed"):
            left = os.listdir(self.dumps / name) if (self.dumps / name).is_dir() else []
            assert left == [], (name, left)


def equal_states(found: bytes, wanted: bytes, name: str) -> None:
    """Two samples: equal to the bit, or token ids equal and states within TOLERANCE."""
    if found == wanted:
        return
    ours, theirs = parts(found), parts(wanted)
    assert ours["token_ids"] == theirs["token_ids"], f"{name}: other tokens"
    left, right = array.array("f", ours["hidden_states"]), array.array("f", theirs["hidden_states"])
    assert len(left) == len(right), f"{name}: {len(left)} values instead of {len(right)}"
    worst = max(abs(one - other) for one, other in zip(left, right, strict=True))
    assert worst <= TOLERANCE, f"{name}: differs from the reference by {worst:.3g}"


def parts(data: bytes) -> dict[str, bytes]:
    """Tensor name -> its bytes, of a safetensors file."""
    start = 8 + int.from_bytes(data[:8], "little")
    document = json.loads(data[8:start])
    document.pop("__metadata__", None)
    return {
        name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
        for name, entry in document.items()
    }


def make_rig(folder: Path, python: Path, lib: Path, samples: tuple[int, int, int] = (32, 16, 128), **more: Any) -> Rig:
    """A rig in ``folder`` with a data set of ``samples`` = (count, shortest, longest in tokens); no server yet."""
    folder.mkdir(parents=True, exist_ok=True)
    rig = Rig(folder, python, lib, **more)
    rig.count = write_dataset(rig.dataset, *samples)
    return rig
