"""What grows with the number of samples, and what a sample costs the client beside its bytes. Engine's Python.

The rows are tiny and the files of finished samples sparse (a real header, then a hole), so that only what goes with their *number* is
measured. Each part is a process of its own (``python -m bench.scale --part PART --folder DIR``): what hs_scan does with the data set and a
finished output folder; the client's resume up to the moment in which it would ask the server; the client at work on what is left, against a
server that answers at once with dumps made beforehand. Prints seconds and the process's peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "files/engine")]

from sglang_hs import dataset, plan  # noqa: E402
from sglang_hs.manifest import Manifest  # noqa: E402

HIDDEN, BOUNDARIES, VOCAB = 128, [1, 2, 4], 1 << 20
PARTS = ("scan", "resume", "work", "bare", "checks")
TOKENS = 8


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


def prepare(folder: Path, memory: Path, rows: int, left: int) -> None:
    """A data set of ``rows`` rows and an output folder in which all but the last ``left`` are done. memory: where dumps lie."""
    from sglang_hs.model import fingerprint
    from sglang_hs_capture.tensorfile import header

    folder.mkdir(parents=True)
    (folder / "dump").symlink_to(memory)
    for name in (
        "out/hidden_states",
        "out/quarantine",
        "dump/want",
        "dump/done",
        "dump/used",
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
        "num_layers": 5, "layout": "D", "release": "bench", "helper_sha256": "", "server": {},
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
        if idx >= rows - left:
            continue
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
    seconds["left"] = found["samples"] - found["done"]


def resume(folder: Path, seconds: dict[str, float]) -> None:
    """The client as it is, up to the first row that it would send."""
    from sglang_hs_client import extract, run
    from sglang_hs_client.spec import parse

    started = time.monotonic()
    sent: list[int] = []

    def instead(self: Any, row: Any) -> None:
        seconds.setdefault("until the first request", time.monotonic() - started)
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
    assert sent, (folder / "run/result.json").read_text()
    assert made.tally.snapshot()["done"] == min(sent), made.tally.snapshot()


def work(folder: Path, seconds: dict[str, float]) -> None:
    """The client as it is, on all that is left; notes the processor time that it has used at every hundredth sample."""
    from sglang_hs_client import extract, run
    from sglang_hs_client.spec import parse

    marks: list[float] = []
    accepted = extract.Extraction._accepted

    def counted(self: Any, *given: Any) -> None:
        accepted(self, *given)
        marks.append(time.process_time())

    extract.Extraction._accepted = counted  # type: ignore[method-assign, assignment]
    with quick_server(folder / "dump") as url:
        code = run.Run(parse({**specification(folder), "server": url})).execute()
    assert code == 0, (folder / "run/result.json").read_text()
    # the first hundred start the threads
    seconds.update((str(index), marks[index]) for index in range(99, len(marks), 100))


def bare(folder: Path, seconds: dict[str, float]) -> None:
    """What no client could do without, with nothing around it, in one thread: a wish, a request of http.client, a durable copy, a look at each byte of it,
    its name, the dump's end, and a row of a book. Notes the processor time at every hundredth sample."""
    import hashlib
    import http.client
    import os
    import shutil
    import sqlite3
    import urllib.parse
    import zlib

    place = folder / "bare"
    place.mkdir()
    book = sqlite3.connect(str(folder / "bare.sqlite"))
    book.execute("CREATE TABLE samples (idx INTEGER PRIMARY KEY, file TEXT, sha256 TEXT)")
    with quick_server(folder / "dump") as url:
        where = urllib.parse.urlsplit(url).netloc
        for number in range(1000):
            ids = [VOCAB - 1 - number, *tokens(0)[1:]]
            name = dataset.sequence_name(ids)
            (folder / "dump/want" / name).touch()
            connection = http.client.HTTPConnection(where)
            connection.request(
                "POST", "/generate", json.dumps({"input_ids": ids}), {"Content-Type": "application/json"}
            )
            json.loads(connection.getresponse().read())
            connection.close()
            dump, part, final = folder / f"dump/done/{name}.safetensors", place / f".{number}", place / str(number)
            shutil.copyfile(dump, part)
            with part.open("rb") as handle:
                data = handle.read()
                sums = hashlib.sha256(data).hexdigest(), zlib.crc32(data)
                os.fsync(handle.fileno())
            os.replace(part, final)
            there = os.open(place, os.O_RDONLY)
            os.fsync(there)
            os.close(there)
            os.unlink(dump)
            os.unlink(folder / "dump/want" / name)
            book.execute("INSERT INTO samples VALUES (?, ?, ?)", (number, str(final), sums[0]))
            if number % 100 == 99:
                book.commit()
                seconds[str(number)] = time.process_time()


def checks(folder: Path, seconds: dict[str, float]) -> None:
    """The client as it is; notes the processor time, of the threads that do it, of what ``bare`` leaves out and none of which is for speed or show:
    a look for a file that is there already, the header against what was asked for, every value of the dump, the norms that tell a drift,
    and the book's questions and entries."""
    from sglang_hs_client import extract, output

    lock = threading.Lock()

    def clocked(owner: Any, name: str, told: str) -> None:
        function = getattr(owner, name)

        def work(*given: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given)
            finally:
                with lock:
                    seconds[told] = seconds.get(told, 0.0) + time.thread_time() - began

        setattr(owner, name, work)

    clocked(extract.Extraction, "_adopt", "there already")
    clocked(output, "check_header", "header")
    clocked(output, "check_data", "values and sums")
    clocked(extract, "measure", "norms")
    for name in ("sample", "done_as", "done", "commit"):
        clocked(Manifest, name, "book")
    work(folder, {})


@contextlib.contextmanager
def quick_server(dumps: Path) -> Iterator[str]:
    """A process that answers like SGLang and writes the wished dump, at once: the time of this process is the client's alone."""
    words = [sys.executable, "-m", "bench.scale", "--serve", "--folder", str(dumps)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield "http://127.0.0.1:" + process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def serve(dumps: Path) -> None:
    """What :func:`quick_server` runs."""
    import zlib

    from sglang_hs_capture.tensorfile import header

    states = array("f", range(1, TOKENS * (len(BOUNDARIES) + 1) * HIDDEN + 1)).tobytes()
    shape = [TOKENS, len(BOUNDARIES) + 1, HIDDEN]
    layout = [("token_ids", "I64", [TOKENS], 8 * TOKENS), ("hidden_states", "F32", shape, len(states))]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = body["input_ids"]
            name = dataset.sequence_name(ids)
            data = array("q", ids).tobytes() + states
            start = header(layout, {"name": name, "crc32": f"{zlib.crc32(data):08x}", "prompts": "1"})
            part = dumps / "done" / f".{name}"
            part.write_bytes(start + data)
            part.rename(dumps / "done" / f"{name}.safetensors")
            answer = json.dumps({"text": "", "meta_info": {"prompt_tokens": len(ids), "cached_tokens": 0}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *given: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


def peak_memory() -> float:
    """Of this process, in MB (10^6 bytes). (getrusage's figure may be that of the process which started this one.)"""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024 / 1e6


def measure(folder: Path, part: str) -> tuple[dict[str, float], float]:
    """(seconds, peak MB) of a part, in a process of its own."""
    words = [sys.executable, "-m", "bench.scale", "--part", part, "--folder", str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="A part of the measurement of scale.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS)
    parser.add_argument("--serve", action="store_true")
    options = parser.parse_args()
    if options.serve:
        serve(options.folder)
        return 0
    seconds: dict[str, float] = {}
    {"scan": scan, "resume": resume, "work": work, "bare": bare, "checks": checks}[options.part](
        options.folder, seconds
    )
    print(json.dumps([seconds, peak_memory()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
