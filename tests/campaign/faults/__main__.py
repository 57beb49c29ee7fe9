"""Play the cells that have no green result yet, several hosts at once; Ctrl-C keeps what is done."""

from __future__ import annotations

import argparse
import os
import pwd
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from . import table
from .cell import Result, all_cells, named, paired, play
from .faults import FAULTS
from .host import REPO, RIG, FaultHost


def main() -> int:
    """Entry point; status 0 when every cell that was asked for is green."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument(
        "--hosts", type=int, default=2, help="hosts at once; each takes about 3 GB and a core now and then"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        metavar="STEP:FAULT",
        help="these cells, - for a blank; STEP: or :FAULT for all of one step or fault",
    )
    parser.add_argument("--again", action="store_true", help="also those that are green")
    parser.add_argument("--apart", action="store_true", help="each cell in a run of its own")
    parser.add_argument("--list", action="store_true", help="say what would be played")
    parser.add_argument("--minutes", type=float, default=0, help="begin no cell after that time")
    parser.add_argument("--octet", type=int, default=61, help="last part of the first host's address")
    given = parser.parse_args()
    results = table.load()
    cells = [cell for cell in all_cells() if _wanted(named(*cell), given.only)]
    if not given.again:
        cells = [cell for cell in cells if (results.get(named(*cell)) or {"problems": [1]})["problems"]]
    print(f"{len(cells)} cells to play")
    if given.list or not cells:
        print("\n".join(named(*cell) for cell in cells))
        table.PAGE.write_text(table.page(results))
        return 0
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    cache = Path(
        os.environ.get("HS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "sglang-hidden-states"
    )
    able = subprocess.run(
        [sys.executable, str(RIG), "check"],
        capture_output=True,
        text=True,
        env={**os.environ, "HS_CACHE": str(cache)},
        check=False,
    )
    if able.returncode:
        print(able.stdout + able.stderr)
        return 3
    todo: queue.Queue[tuple[tuple[str, str], ...]] = queue.Queue()
    runs = [(cell,) for cell in cells] if given.apart else paired(cells)
    for run in runs:
        todo.put(run)
    print(f"in {len(runs)} runs", flush=True)
    stop, writing = threading.Event(), threading.Lock()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    until = time.monotonic() + given.minutes * 60 if given.minutes else float("inf")
    with tempfile.TemporaryDirectory(prefix="hs-faults-", dir="/tmp") as folder:
        threads = [
            threading.Thread(
                target=_work,
                args=(
                    f"hs-fault-{number}",
                    given.octet + number,
                    Path(folder) / str(number),
                    cache,
                    todo,
                    results,
                    writing,
                    stop,
                    until,
                ),
            )
            for number in range(min(given.hosts, len(runs)))
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.5)
        except KeyboardInterrupt:
            print("finishing the cells at work; Ctrl-C again is of no use")
            stop.set()
            for thread in threads:
                thread.join()
    asked = [results.get(named(*cell)) for cell in cells]
    red = [found for found in asked if found is None or found["problems"]]
    print(f"{len(asked) - len(red)} of {len(asked)} green; {table.PAGE.relative_to(REPO)} is written")
    return 1 if red else 0


def _wanted(name: str, only: list[str]) -> bool:
    step, _, fault = name.partition(":")
    known = {word.replace(" ", "-") for word in (name, f"{step}:", f":{fault}")}
    return not only or any(word.replace(" ", "-") in known for word in only)


def _work(
    name: str,
    octet: int,
    folder: Path,
    cache: Path,
    todo: queue.Queue[tuple[tuple[str, str], ...]],
    results: dict[str, dict[str, object]],
    writing: threading.Lock,
    stop: threading.Event,
    until: float,
) -> None:
    """One host plays one cell after the other; a host that is beyond repair is made anew."""
    host: FaultHost | None = None
    try:
        while not stop.is_set() and time.monotonic() < until:
            try:
                run = todo.get_nowait()
            except queue.Empty:
                return
            begun = time.monotonic()
            try:
                if host is None:
                    host = FaultHost(name, octet, folder, cache)
                    host.up()
                found = play(host, *((step, FAULTS[fault]) for step, fault in run)).as_dict()
            except Exception as error:
                found = Result(*run[0], problems=[f"the test itself: {type(error).__name__}: {error}"]).as_dict()
            took = time.monotonic() - begun
            log = table.REPO / ".local/faults" / "+".join(map("-".join, run)).replace(" ", "_").replace("/", "_")
            if host is not None and host.log.exists():
                log.parent.mkdir(parents=True, exist_ok=True)
                log.with_name(log.name + ".log").write_text(host.log.read_text() + host.guard_log())
            apart = len(run) > 1 and bool(found["problems"])
            with writing:
                for step, fault in run if not apart else ():
                    beside = [named(*cell) for cell in run if cell != (step, fault)]
                    results[named(step, fault)] = {**found, "step": step, "fault": fault, "beside": beside}
                    table.save(results)
                told = "RED " + "; ".join(found["problems"]) if found["problems"] else "green"
                names = " and ".join(named(*cell) for cell in run)
                print(f"{time.strftime('%H:%M:%S')} {names}: {told}, {took:.0f} s, {found['why']}", flush=True)
                for note in found["notes"]:
                    print(f"    {note}", flush=True)
            if apart:
                print(f"    to be played apart: {names}", flush=True)
                for cell in run:
                    todo.put((cell,))
            if found["problems"] and host is not None:
                host.down()
                host = None
    finally:
        if host is not None:
            host.down()


if __name__ == "__main__":
    sys.exit(main())
