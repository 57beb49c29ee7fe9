"""kill -9 of the client, of the scheduler, of the whole server, at random moments of a real extraction; then what died is started again.

    .venv/bin/python tests/campaign/kills.py --count 200 [--seed N] [--servers SHARE]     (make kills COUNT=200)

A run is complete and equal when, after the restart and the resume, every sample is there once, equal to a pass without faults
(which itself equals Hugging Face), book and files agree, and nothing half-written is left. What was in its final place at the
moment of the kill is compared as well. The seed is printed; the same seed gives the same kinds and moments.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "tests/e2e")]

from rig import Ended, Rig, install, make_rig, private_engine  # noqa: E402
from sglang_hs import procs  # noqa: E402

KINDS = ("client", "scheduler", "server")
PATIENT, IMPATIENT = 180.0, 1.0  # seconds that the client waits for a server that is gone


class Forked:
    """A client of the nursery, in the words of subprocess.Popen as far as the rig uses them."""

    def __init__(self, nursery: subprocess.Popen[str], log: Path, words: tuple[str, ...]) -> None:
        assert nursery.stdin is not None and nursery.stdout is not None
        self._told, self._log = nursery.stdout, log
        nursery.stdin.write(json.dumps([str(log), *words]) + "\n")
        nursery.stdin.flush()
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("client", timeout or 0)
            self.returncode = int(self._told.readline())
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return self._log.read_text(), None


class Late(Exception):
    """The client was through before the blow fell: the run says nothing and is played again."""


class Campaign:
    """One server, many runs. ``seconds``: how long a pass without faults works, imports not counted."""

    def __init__(self, rig: Rig, draw: random.Random) -> None:
        self.rig = rig
        self.draw = draw
        self.seconds = 0.0
        self.late = 0
        words = [str(rig.python), str(ROOT / "tests/campaign/nursery.py")]
        self.nursery = subprocess.Popen(
            words, env=rig.client_env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        rig.launcher = lambda *words: Forked(self.nursery, rig.folder / "client.log", words[1:])
        # on the dumps' own file system a sample is moved, on any other it is copied
        self.places = [(rig.output, "copied"), (rig.dumps.with_name(rig.dumps.name + "_out"), "moved")]

    def close(self) -> None:
        """End the nursery, remove what the last run left."""
        assert self.nursery.stdin is not None
        self.nursery.stdin.close()
        self.nursery.wait()
        self.rig.forget()

    def reference(self) -> None:
        """A pass without faults, judged by Hugging Face."""
        self.rig.forget()
        ended = self.rig.run()
        assert ended.code == 0, ended
        self.seconds = float(ended.result["seconds"])
        print(f"reference: {self.rig.equals_hugging_face()}; a pass takes {self.seconds:.2f} s", flush=True)
        self.rig.keep_reference()

    def play(self, kind: str) -> str:
        """One run with a blow of this kind, and what was seen; AssertionError where something is lost."""
        self.rig.forget()
        self.rig.output, where = self.draw.choice(self.places)
        while True:
            self.rig.forget()
            try:
                return f"{self.client() if kind == 'client' else self.server(kind)}; {where}"
            except Late:
                self.late += 1

    def client(self) -> str:
        """Killed once, now and then again while it resumes, then left to finish."""
        told = []
        for blow in range(2 if self.draw.random() < 0.25 else 1):
            client = self.rig.begin()
            moment = self.draw.uniform(0, self.seconds)
            self.rig.wait_begun(client)
            time.sleep(moment)
            if client.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # through in this very moment
                    os.killpg(client.pid, signal.SIGKILL)  # a process group of its own: the client alone
            if client.wait() != -signal.SIGKILL:
                if blow:
                    break  # the resume was through already
                raise Late
            told.append(f"at {moment:.3f} s, {self.accepted()} of {self.rig.count} in place")
        self.finish(self.rig.run())
        return "; again ".join(told)

    def server(self, kind: str) -> str:
        """The scheduler or all of the server killed; the client waits for a new one, or gives up and is started again."""
        rig, waits = self.rig, self.draw.random() < 0.5
        client = rig.begin(outage_s=PATIENT if waits else IMPATIENT, retries=4)
        # in the canary, or once some samples are there
        wanted, moment = self.draw.randrange(rig.count - 4), self.draw.uniform(0, self.seconds / rig.count)
        rig.wait_begun(client)
        while len(rig.files()) < wanted and client.poll() is None:
            time.sleep(0.001)
        time.sleep(moment)
        if client.poll() is not None:
            raise Late
        if kind == "scheduler":
            procs.signal_process(rig.scheduler(), signal.SIGKILL)
            began = time.monotonic()
            rig.wait_gone()
            how = f"the server followed its scheduler after {time.monotonic() - began:.1f} s"
        else:
            rig.kill_server()
            how = "the server was killed"
        accepted = self.accepted()
        ended = None if waits else rig.end(client)
        rig.start(fresh=not waits)
        rig.wait_ready()
        ended = rig.end(client) if ended is None else ended
        # nobody waits in the canary: it has proved nothing yet
        again = ended.code != 0
        if again:
            assert ended.result.get("outcome") in ("failed", "canary_refused"), ended
            ended = rig.run()
        self.finish(ended)
        return (
            f"with {accepted} of {rig.count} in place; {how}; the client {'was started again' if again else 'waited'}"
        )

    def accepted(self) -> int:
        """How many samples are in their final place; each must be whole and right already."""
        names = [name for name in self.rig.files() if not name.startswith(".")]
        for name in names:
            self.rig.check_accepted(name)
        return len(names)

    def finish(self, ended: Ended) -> None:
        """The last client of a run has ended."""
        assert ended.code == 0, ended
        self.rig.check_complete()


def plan(count: int, servers: float, draw: random.Random) -> list[str]:
    """The kinds of the runs, in random order: a share of ``servers`` kills scheduler or server, in turns, at least one of each."""
    heavy = max(2, round(count * servers))
    kinds = [KINDS[1 + number % 2] for number in range(heavy)] + ["client"] * (count - heavy)
    draw.shuffle(kinds)
    return kinds


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill client, scheduler and server at random moments.")
    parser.add_argument("--count", type=int, default=200, help="runs, at least 3")
    parser.add_argument("--seed", type=int, help="of kinds and moments; a new one unless given")
    parser.add_argument("--servers", type=float, default=0.2, help="share of runs that kill scheduler or server")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    draw = random.Random(seed)
    print(f"seed {seed}", flush=True)
    right: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="hs-kills-") as folder:
        place = Path(folder)
        rig = make_rig(place / "rig", private_engine(place), install(place / "lib"))
        with rig.serving(), contextlib.closing(Campaign(rig, draw)) as campaign:
            campaign.reference()
            for number, kind in enumerate(plan(options.count, options.servers, draw), 1):
                try:
                    seen = campaign.play(kind)
                    right[kind] += 1
                except AssertionError as error:
                    seen = f"FAILED: {error}"
                    if not rig.alive():
                        rig.start()
                        rig.wait_ready()
                print(f"{number:4d} {kind}: {seen}", flush=True)
    if campaign.late:
        print(f"{campaign.late} runs were through before the blow and were played again")
    told = ", ".join(f"{kind} {right[kind]}" for kind in KINDS)
    print(f"kills: {sum(right.values())} of {options.count} runs complete and equal ({told})")
    return 0 if sum(right.values()) == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
