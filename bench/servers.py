"""Real servers on the CPU to measure: with the capture or without, of any size, each forward timed from outside. Controller's Python."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import rig
from sglang_hs import command, procs, server, steps

from .frame import ROOT

WIDE = ("hidden_size=7168", "num_hidden_layers=5")


class Forward(NamedTuple):
    """One prefill: tokens, and seconds of the monotonic clock."""

    tokens: int
    begin: float
    end: float

    @property
    def took(self) -> float:
        """Seconds."""
        return self.end - self.begin


def make_model(folder: Path, *changes: str) -> Path:
    """A model of another size than the local engine's."""
    words = [str(rig.PYTHON), str(ROOT / "bench/models.py"), str(folder), *changes]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(words, check=True, env=env, stdout=subprocess.DEVNULL)
    return folder


@dataclass
class Server(rig.Rig):
    """A server and a client as in the tests of faults. capture: whether it is the edited engine that captures. model: its folder."""

    capture: bool = True
    model: Path = rig.MODEL
    dtype: str = "float32"
    tokens_per_forward: int = 0
    boundaries: tuple[int, ...] = rig.BOUNDARIES
    settings: dict[str, str] = field(default_factory=dict)  # further variables of the environment

    @property
    def times(self) -> Path:
        """What bench/inside/engine_times.py writes."""
        return self.folder / "times.log"

    def start(self, fresh: bool = True) -> None:
        """Start the server and return."""
        argv, env = rig.production(self.folder, self.python, self.port, self.tp)
        argv = [str(self.model) if word == str(rig.MODEL) else word for word in argv]
        argv[argv.index("--dtype") + 1] = self.dtype
        flags = set(rig.known_flags(self.python))
        words = command.extraction(
            argv, flags, self.port + 1, "torch_native", tokens_per_forward=self.tokens_per_forward
        )
        words += list(self.extra)
        if self.capture:
            settings = {"dump_dir": self.dumps, "boundaries": self.boundaries, "final": "pre_norm"}
            env.update(command.environment(settings, str(self.lib), env))
        env.update(SGL_CPU_EXTRA="engine_times", SGL_CPU_FORK="", HS_BENCH_LOG=str(self.times), **self.settings)
        env["PYTHONPATH"] = f"{env['PYTHONPATH']}:{ROOT / 'bench/inside'}"
        self.folder.mkdir(parents=True, exist_ok=True)
        steps.dump_folder(self.dumps, os.geteuid(), os.getegid())
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
        """Until tokens come back, and the capture is attached where there is one."""
        if self.capture:
            super().wait_ready(patience)
            return
        import time

        until = time.monotonic() + patience
        while server.healthy(self.url, timeout=60) is not None:
            if not self.alive() or time.monotonic() > until:
                raise RuntimeError(f"the server is not ready: {self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server, also one that is paused."""
        self.resume()
        super().stop()

    def pause(self) -> None:
        """Take the processor away from it, so that the other side is alone."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self.family():
            procs.signal_process(process, number)

    def spec(self, **changes: Any) -> dict[str, Any]:
        """The client's specification for this model."""
        config = json.loads((self.model / "config.json").read_text())["text_config"]
        mine = {
            "model_path": str(self.model),
            "hidden_size": config["hidden_size"],
            "vocab_size": config["vocab_size"],
            "canary": {"skip": True},
            "dump_wait_s": 120,
            "in_flight": 4,
        }
        return super().spec(**{**mine, **changes})

    def forwards(self, after: int = 0) -> list[Forward]:
        """The prefills so far, from line ``after`` of the log on."""
        lines = self.times.read_text().splitlines()[after:] if self.times.exists() else []
        return [
            Forward(int(one[1]), float(one[2]), float(one[3])) for one in map(str.split, lines) if one[0] == "forward"
        ]

    def idle(self, after: int = 0) -> list[tuple[float, float]]:
        """The spans without a prompt."""
        lines = self.times.read_text().splitlines()[after:]
        return [(float(one[1]), float(one[2])) for one in map(str.split, lines) if one[0] == "idle"]

    def mark(self) -> int:
        """How many lines the log has now."""
        return len(self.times.read_text().splitlines()) if self.times.exists() else 0

    def ask(self, ids: list[int], **more: Any) -> bytes:
        """The answer to one prompt, for one new token."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            **more,
        }
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return bytes(answer.read())


def prompts(count: int, shortest: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Prompts of plain tokens, no two alike."""
    draw = random.Random(seed)
    return [draw.choices(range(12, 512), k=draw.randint(shortest, longest)) for _ in range(count)]


def write_dataset(path: Path, rows: list[list[int]]) -> None:
    """As JSON lines."""
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in rows))


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[tuple[Path, Path]]:
    """(Python of a private, edited engine, what a run installs), gone at the end."""
    folder.mkdir(parents=True)
    (folder / "lib").mkdir()
    try:
        yield rig.private_engine(folder), rig.install(folder / "lib")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
