"""Bytes a second of the whole path against SpecForge's own writer.

The whole path: from the forward's tensors (2,048 tokens, three boundaries and the final state of 7,168, 117 MB a sample) to samples in
their place on the same disk, its cache flushed on both sides. SpecForge 0.2.0 (its package from PyPI, unchanged) puts each sample into its
`SharedDirFeatureStore`: `torch.save` and a rename, by as many threads as our client has here. Its preparation script, which does the same
inside its own copy of the engine, is no part of the package and was not run. Ours is the capture's hooks and writer, and
the client's verification: two checksums, every value looked at, every byte read again where it stays, fsync, sha256.
SpecForge's path has none of these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.frame import Figure, Place

PYTHON = "engine"
ORDER = 40
LIMIT = """
Processor time, on two cores with a disk that takes what they write as fast as they do: the note has what a sample takes on both sides. What ours spends beyond
theirs are its checks: a checksum of the dump, one of what arrived, every value looked at, and the sha256 that stays in the book.
"""


def run(place: Place) -> Iterator[Figure]:
    """Both, in turns."""
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import trainers

    from bench import capture, paths

    capture.one_thread()
    sys.path.append(str(trainers.folder("current")))
    from specforge.runtime.data_plane.disaggregated import SharedDirFeatureStore

    forward = capture.Forward()

    def theirs() -> float:
        def work() -> None:
            store = SharedDirFeatureStore(str(place.disk / "work"), "bench")

            def put(idx: int, tensors: dict[str, torch.Tensor]) -> None:
                store.put(tensors, sample_id=str(idx), metadata={"num_tokens": forward.tokens})

            with ThreadPoolExecutor(paths.WORKERS) as pool:
                jobs = []
                for idx in range(paths.COUNT):
                    ids = torch.tensor(forward.ids(idx))
                    tensors = {
                        "input_ids": ids,
                        "loss_mask": torch.ones_like(ids),
                        # as its format has them: [1, T, 3H] and [1, T, H], copied out of the forward
                        "aux_hidden_state": torch.cat(forward.states[:-1], dim=-1).unsqueeze(0),
                        "hidden_state": forward.states[-1].clone().unsqueeze(0),
                    }
                    jobs.append(pool.submit(put, idx, tensors))
                for job in jobs:
                    job.result()

        took = paths.durable(place.disk, work)
        paths.clean(place.disk / "work", paths.COUNT, forward.size)
        return took

    yield from paths.against(place, "SpecForge 0.2.0's store", forward, theirs)
