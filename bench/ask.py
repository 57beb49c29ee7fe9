"""One sample from a real server in both ways, timed; engine's Python. ``python -m bench.ask SPEC PROMPTS TIMES``: prints a JSON list of each.

As files: the client's own wish, request, wait, verification and move. As JSON: the same prompt with ``return_hidden_states``, the answer parsed (orjson, the
fastest that the engine has), made a tensor and saved. Each time is without the server's own forward, which its log tells. Third, what the
sample's bytes alone take: one write, synced.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import save_file
from sglang_hs.dataset import sequence_name
from sglang_hs_client.dumpfile import Expected
from sglang_hs_client.exchange import Exchange
from sglang_hs_client.output import Output
from sglang_hs_client.server import Server
from sglang_hs_client.spec import parse


def forwards(log: Path) -> list[float]:
    """Seconds of each forward so far."""
    found = [line.split() for line in log.read_text().splitlines()]
    return [float(one[3]) - float(one[2]) for one in found if one[0] == "forward"]


def main() -> int:
    """The command line."""
    spec = parse(json.loads(Path(sys.argv[1]).read_text()))
    rows, log = json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    torch.set_num_threads(1)
    server, exchange, output = Server(spec.server, None, 600.0), Exchange(Path(spec.dump_dir)), Output(spec.output)
    exchange.open()
    dtype = exchange.check(spec)["dtype"]
    expected = Expected(spec.states, spec.hidden_size, dtype, spec.final)
    output.open()

    def as_files(idx: int, ids: list[int]) -> None:
        name = sequence_name(ids)
        exchange.wish(name)
        server.generate(ids, name + "-1")
        output.accept(exchange.wait(name, 120), idx, ids, name, expected)
        exchange.hand_back(name)
        exchange.forget(name)

    def as_json(idx: int, ids: list[int]) -> None:
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_hidden_states": True}
        request = urllib.request.Request(
            spec.server + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            states = orjson.loads(answer.read())["meta_info"]["hidden_states"]
        tensor = torch.tensor(states[0], dtype=getattr(torch, dtype))
        assert list(tensor.shape) == [len(ids), spec.hidden_size], tensor.shape
        save_file(
            {"hidden_states": tensor, "token_ids": torch.tensor(ids)}, str(spec.output / f"json_{idx}.safetensors")
        )

    def bare(idx: int) -> float:
        data = (spec.output / f"hidden_states/hs_{idx}.safetensors").read_bytes()
        began = time.monotonic()
        with (spec.output / f"bare_{idx}").open("wb") as file:
            file.write(data)
            os.fsync(file.fileno())
        return time.monotonic() - began

    times: dict[Any, list[float]] = {as_files: [], as_json: []}
    alone = []
    for idx, ids in enumerate(rows):
        for way in (as_files, as_json) if idx % 2 else (as_json, as_files):
            before = len(forwards(log))
            began = time.monotonic()
            way(idx, ids)
            took = time.monotonic() - began
            (computed,) = forwards(log)[before:]
            times[way].append(took - computed)
        alone.append(bare(idx))
    output.close()
    exchange.close()
    print(json.dumps([times[as_files], times[as_json], alone]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
