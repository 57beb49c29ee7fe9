"""Memory and start of a resume against the number of rows: 10^3 and 10^6 unless told otherwise.

    ENGINE_PYTHON bench/client_scale.py [--rows 1000 1000000] [--folder DIR]

The rows are tiny and the samples' files sparse (a real header, then a hole), so that only what grows with their *number* is
measured. Each measurement is a process of its own: what hs_scan does with the data set and a finished output folder; the client
filling its book; the client's resume of a folder in which all but one row are done, up to the moment in which it would ask the
server for that row. Prints seconds of each part and the process's peak memory; nothing is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "files/engine")]

from sglang_hs import dataset, plan  # noqa: E402
from sglang_hs.manifest import Manifest  # noqa: E402

HIDDEN, BOUNDARIES, VOCAB = 128, [1, 2, 4], 1 << 20
PARTS = ("scan", "enter", "resume")


def tokens(idx: int) -> list[int]:
    """Eight tokens that no other row has."""
    return [idx, 1, 2, 3, 4, 5, 6, 7]


def specification(folder: Path) -> dict[str, Any]:
    """What the client is told."""
    return {
        "server": "http://127.0.0.1:1",
        "dataset": str(folder / "data.jsonl"),
        "output_dir": str(folder / "out"),
        "dump_dir": str(folder / "dump"),
        "model_path": str(folder / "model"),
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "max_prompt": 100,
        "run_dir": str(folder / "run"),
        "boundaries": BOUNDARIES,
        "canary": {"skip": True},
    }


def settings(folder: Path) -> dict[str, Any]:
    """What hs_scan is told."""
    return {
        "dataset": str(folder / "data.jsonl"),
        "output_dir": str(folder / "out"),
        "dump_dir": str(folder / "dump"),
        "state_dir": str(folder / "state"),
        "cut_to": None,
        "max_prompt": 100,
        "boundaries": BOUNDARIES,
        "final": "pre_norm",
        "in_flight": 4,
        "tokens_per_forward": 0,
        "model": {"hidden_size": HIDDEN, "vocab_size": VOCAB, "itemsize": 4},
    }


def prepare(folder: Path, rows: int) -> None:
    """A data set of ``rows`` rows and an output folder in which all but the last are done."""
    from sglang_hs_capture.tensorfile import header
    from sglang_hs_client.checkpoint import fingerprint

    for name in (
        "out/hidden_states",
        "out/quarantine",
        "dump/want",
        "dump/done",
        "dump/failed",
        "dump/attached",
        "model",
    ):
        (folder / name).mkdir(parents=True)
    with (folder / "data.jsonl").open("w") as handle:
        for idx in range(rows):
            handle.write(json.dumps({"input_ids": tokens(idx)}) + "\n")
    report = {
        "rank": 0, "tp_size": 1, "boundaries": BOUNDARIES, "final": "pre_norm", "hidden_size": HIDDEN, "dtype": "float32",
    }  # fmt: skip
    (folder / "dump/attached/rank0.json").write_text(json.dumps(report))
    length, states = len(tokens(0)), len(BOUNDARIES) + 1
    size = length * states * HIDDEN * 4
    layout = [("token_ids", "I64", [length], 8 * length), ("hidden_states", "F32", [length, states, HIDDEN], size)]
    book = Manifest(folder / "out", lag=3600)
    book.claim(
        {
            "dataset_sha256": dataset.digest(folder / "data.jsonl"),
            "cut_to": None,
            "model": fingerprint(folder / "model"),
            "hidden_size": HIDDEN,
            "boundaries": BOUNDARIES,
            "final": "pre_norm",
            "dtype": "float32",
        }
    )
    for idx in range(rows):
        name = dataset.sequence_name(tokens(idx))
        book.add([(idx, name, length, None)])
        if idx == rows - 1:
            break
        file = f"hidden_states/hs_{idx}.safetensors"
        start = header(layout, {"name": name, "crc32": "00000000"})
        with (folder / "out" / file).open("wb") as sample:
            sample.write(start)
            sample.truncate(len(start) + 8 * length + size)
        book.done(idx, file, len(start) + 8 * length + size, "0" * 64)
    book.set("entered", True)
    book.close()


def timed(function: Callable[[], Any], name: str, seconds: dict[str, float]) -> Any:
    """Call and note how long it took."""
    begin = time.monotonic()
    found = function()
    seconds[name] = seconds.get(name, 0.0) + time.monotonic() - begin
    return found


def scan(folder: Path, seconds: dict[str, float]) -> None:
    """hs_scan's work."""
    found = timed(lambda: plan.look(settings(folder), False, 0), "look", seconds)
    assert found["samples"] - found["done"] == 1, found


def enter(folder: Path, seconds: dict[str, float]) -> None:
    """A new run's first work: the book, filled."""
    from sglang_hs_client.run import Run
    from sglang_hs_client.spec import parse

    fresh = folder / "fresh"
    fresh.mkdir()
    run = Run(parse(dict(specification(folder), output_dir=str(fresh))))
    book = Manifest(fresh)
    timed(lambda: run._enter_rows(book), "enter", seconds)
    book.close()
    shutil.rmtree(fresh)


def resume(folder: Path, seconds: dict[str, float]) -> None:
    """The client as it is, up to the first row that it would send."""
    from sglang_hs_client import extract, run
    from sglang_hs_client.spec import parse

    started = time.monotonic()
    sent: list[int] = []

    def instead(self: Any, row: Any) -> None:
        seconds["until the first request"] = time.monotonic() - started
        sent.append(row.idx)
        self.stop(extract.Halt("stopped", "the bench has seen enough"))

    extract.Extraction._sample = instead  # type: ignore[method-assign]
    for owner, name in ((run.Output, "open"), (run.Run, "_enter_rows"), (run.Run, "_verify_done"), (run.Run, "_count")):
        original = getattr(owner, name)
        setattr(
            owner,
            name,
            lambda *given, original=original, name=name: timed(lambda: original(*given), name.strip("_"), seconds),
        )
    digest = dataset.digest
    dataset.digest = lambda path: timed(lambda: digest(path), "data set's checksum", seconds)
    made = run.Run(parse(specification(folder)))
    made.execute()
    assert len(sent) == 1, (folder / "run/result.json").read_text()
    assert made.tally.snapshot()["done"] == sent[0], made.tally.snapshot()


def peak_memory() -> float:
    """Of this process, in MB (10^6 bytes). (getrusage's figure may be that of the process which started this one.)"""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def measure(folder: Path) -> Iterator[tuple[str, dict[str, float], float]]:
    """(part, seconds, peak MB) of each part, each in a process of its own."""
    for part in PARTS:
        words = [sys.executable, __file__, "--part", part, "--folder", str(folder)]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        seconds, peak = json.loads(done.stdout.splitlines()[-1])
        yield part, seconds, peak


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Memory and start of a resume against the number of rows.")
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 1000000])
    parser.add_argument("--folder", type=Path, help="where the made-up output folders lie for a while (4 KB a row)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        seconds: dict[str, float] = {}
        {"scan": scan, "enter": enter, "resume": resume}[options.part](options.folder, seconds)
        print(json.dumps([seconds, peak_memory()]))
        return 0
    peaks: dict[str, list[float]] = {part: [] for part in PARTS}
    for rows in options.rows:
        with tempfile.TemporaryDirectory(prefix="hs-scale-", dir=options.folder) as place:
            began = time.monotonic()
            prepare(Path(place), rows)
            print(f"{rows:,} rows (made in {time.monotonic() - began:.0f} s)", flush=True)
            for part, seconds, peak in measure(Path(place)):
                peaks[part].append(peak)
                told = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
                print(f"  {part}: {told}; peak {peak:.0f} MB", flush=True)
    for part in PARTS:
        print(f"{part}: peak memory {' -> '.join(f'{peak:.0f}' for peak in peaks[part])} MB")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
