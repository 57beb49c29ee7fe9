"""``make bench-gpu``: what no CPU shows - the copies beside a running forward. Engine's Python, a CUDA device.

Layers of Kimi-K2.5's width do a forward's work as matrix products (no model, no engine) and the shipped capture hangs in their hooks.

    pinned       bytes a second from the device to the capture's pinned buffer, against the device's own memcpy of the same bytes
    overlap      a forward that is captured against the same forward that is not: the copies run on a stream of their own
    writer       samples a second with the writer at work, against the forwards alone

Exit status: 0 all goals met, 1 one missed, 2 there is no GPU here. Nothing is stored.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .frame import ROOT, Figure, Goal, Place, rounds
from .report import table

sys.path[:0] = [str(ROOT / part) for part in ("module_utils", "files/engine")]

LAYERS, WIDTH, INNER = 61, 7168, 2048
REPEATS = 15


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure the capture on a GPU.")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt")
    parser.add_argument("--work", type=int, default=4, help="matrix products a layer: how long a forward takes")
    options = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("bench-gpu: torch is not installed here", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print(
            "bench-gpu: no GPU here: the pinned copies, their overlap with a forward and the writer beside both stay unmeasured",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="sglang-hs-bench-", dir="/dev/shm") as folder:
        figures = measure(Path(folder), options.tokens, options.work, torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, {options.tokens} tokens, {LAYERS} layers of {WIDTH}")
    print(table([figure.row() for figure in figures]))
    return 0 if all(figure.met for figure in figures) else 1


def measure(folder: Path, tokens: int, work: int, device: Any) -> list[Figure]:
    """The three figures."""
    import torch

    from . import capture

    place = Place("gpu", folder, folder)
    recorder = capture.recorder(folder / "dumps", device=device)
    pool, written = recorder.pool, capture.Written(recorder)
    size = tokens * 4 * WIDTH * 2
    state = torch.randn(tokens, WIDTH, device=device).to(torch.bfloat16)
    up = torch.randn(WIDTH, INNER, device=device).to(torch.bfloat16) / WIDTH**0.5
    down = torch.randn(INNER, WIDTH, device=device).to(torch.bfloat16) / INNER**0.5
    numbers = iter(range(1 << 30))
    wished: list[Any] = []  # batches whose states are asked for

    def wish(count: int) -> None:
        for _ in range(count):
            ids = capture.prompt(next(numbers), tokens)
            name = capture.sequence_name(ids)
            capture.wish(folder / "dumps", name)
            batch = capture.batch(ids, name)
            batch.input_ids = batch.input_ids.to(device)  # where the engine has them: the capture fetches them
            wished.append(batch)

    def forward(captured: bool) -> None:
        """As the engine's: every layer's products, the hooks between them."""
        residual = state.clone()
        if captured:
            recorder.begin(wished.pop())
        for layer in range(LAYERS):
            if captured and layer in capture.BOUNDARIES:
                recorder.boundary(layer, residual)
            for _ in range(work):
                residual += (residual @ up) @ down * 1e-3
        if captured:
            recorder.final((residual, None), (state, residual))
            recorder.end()

    def clocked(steps: Callable[[], None]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        steps()
        torch.cuda.current_stream().synchronize()
        return time.perf_counter() - began

    def clear() -> None:
        written.wait()
        for part in ("want", "done"):
            for path in (folder / "dumps" / part).iterdir():
                path.unlink()

    def one(captured: bool) -> float:
        wish(captured)
        took = clocked(lambda: forward(captured))
        clear()
        return took

    def pinned() -> float:
        slot = pool.take(size)

        def send() -> None:
            pool.send(slot, size)
            slot.wait()

        took = clocked(send)
        pool.give_back(slot)
        return size / 1e9 / took

    target, source = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )

    def plain() -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)

        return size / 1e9 / clocked(copy)

    def stream(captured: bool) -> float:
        def many() -> None:
            for _ in range(8):
                forward(captured)
            written.wait()

        wish(8 * captured)
        took = clocked(many) / 8
        clear()
        return took

    ours, theirs = rounds(REPEATS, pinned, plain)
    figures = [place.ratio("pinned", "GB/s", ours, theirs, Goal("at least", 0.95), "a plain copy into pinned memory")]
    ours, theirs = rounds(REPEATS, lambda: one(True), lambda: one(False))
    figures.append(place.ratio("overlap", "s", ours, theirs, Goal("at most", 1.05), "the same forward, not captured"))
    ours, theirs = rounds(5, lambda: stream(True), lambda: stream(False))
    figures.append(place.ratio("writer", "s", ours, theirs, Goal("at most", 1.05), "eight forwards, not captured"))
    failed = list((folder / "dumps/failed").iterdir())
    if failed:
        raise RuntimeError(f"the capture failed: {failed[0].read_text()}")
    assert statistics.median(ours) > 0
    return figures


if __name__ == "__main__":
    sys.exit(main())
