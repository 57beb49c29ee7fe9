"""Bytes a second of the whole path against the asynchronous writer of vLLM's hidden-states connector.

The same tensors and the same disk as for vs_specforge. The connector's own code (its file out of the wheel on PyPI) gathers a sample's
states from the paged cache and hands them to its pool of eight threads, which writes a safetensors file under a lock; its own
`load_hidden_states` waits for that lock and reads the file, speculators' own `check_hidden_states` looks for values that are not
finite, and the file is renamed to its sample's name, as speculators' preparation does it. Its engine, its scheduler's bookkeeping and
the copy from a GPU (a CUDA stream) could not be run here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.frame import Figure, Place

PYTHON = "engine"
ORDER = 50
BLOCK = 16  # tokens of a block of the paged cache
LIMIT = """
Processor time, on two cores with a disk that takes what they write as fast as they do: the note has what a sample takes on both sides. What ours spends beyond
theirs are its checks: a checksum of the dump, one of what arrived, every value looked at, and the sha256 that stays in the book.
"""


def run(place: Place) -> Iterator[Figure]:
    """Both, in turns."""
    import fcntl
    import os
    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path
    from types import SimpleNamespace

    import torch
    import trainers

    from bench import capture, paths, vllm_connector

    capture.one_thread()
    connector = vllm_connector.load(Path(os.environ["HS_CACHE"]))
    sys.path.append(str(trainers.folder("current")))
    from speculators.data_generation.offline import check_hidden_states

    writer = connector.ExampleHiddenStatesConnector
    forward = capture.Forward()
    # [blocks, heads, block size, width], as the connector indexes it; a head for each state
    stacked = torch.stack(forward.states, dim=0).view(4, -1, BLOCK, forward.hidden)
    cache = stacked.transpose(0, 1).transpose(1, 2).contiguous().transpose(1, 2)
    slots = torch.arange(forward.tokens)
    event = SimpleNamespace(synchronize=lambda: None)  # of the copy from a GPU: there is none

    def theirs() -> float:
        folder = place.disk / "work"
        folder.mkdir(exist_ok=True)

        def work() -> None:
            with ThreadPoolExecutor(8) as pool, ThreadPoolExecutor(paths.WORKERS) as client:

                def accept(idx: int, ids: list[int]) -> None:
                    path = str(folder / f"{idx}.safetensors")
                    check_hidden_states(connector.load_hidden_states(path), ids)
                    connector.cleanup_hidden_states(path, keep_hidden_states=True)
                    os.replace(path, folder / f"hs_{idx}.safetensors")

                jobs = []
                for idx in range(paths.COUNT):
                    ids = forward.ids(idx)
                    states = connector.extract_from_kv_cache(cache, slots, forward.tokens)
                    path = str(folder / f"{idx}.safetensors")
                    lock = os.open(path + ".lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    tensors = {"hidden_states": states, "token_ids": torch.tensor(ids)}
                    pool.submit(writer._write_tensors, tensors, event, path, lock)
                    jobs.append(client.submit(accept, idx, ids))
                for job in jobs:
                    job.result()

        took = paths.durable(place.disk, work)
        paths.clean(folder, paths.COUNT, forward.size)
        return took

    yield from paths.against(place, f"vLLM {vllm_connector.RELEASE}'s connector", forward, theirs)
