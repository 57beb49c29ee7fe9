"""What the engine lends for a forward is the engine's again when that ends: the next batch goes into the same tensors.

SGLang's eager runner has one set of input buffers and puts every batch into it, and its kernels reuse the states' storage. The writer
comes later, by any time; so it may look at nothing but copies that were made during the forward.
"""

from __future__ import annotations

import errno
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, List, Set

import pytest
import torch
from fake_engine import Model, batch, capture
from safetensors.torch import load_file
from sglang_hs.dataset import sequence_name
from sglang_hs_capture import tensorfile
from sglang_hs_capture.recorder import Recorder
from sglang_hs_capture.writer import Job

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def forward(model: Model, given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(given.input_ids, None, given)


def wish(folder: Path, prompts: List[List[int]], content: str = "") -> List[str]:
    names = [sequence_name(ids) for ids in prompts]
    for name in names:
        (folder / "want" / name).write_text(content)
    return names


def held_jobs(recorder: Recorder) -> List[Job]:
    """The jobs that the writer would have, in its stead."""
    held: List[Job] = []
    recorder.writer.put = held.append  # type: ignore[method-assign]
    return held


def storages(root: Any) -> Set[int]:
    """Addresses of the storage of every tensor that ``root`` reaches; the recorder's own life is no part of a job."""
    found: Set[int] = set()
    seen, open_ends = set(), [root]
    while open_ends:
        one = open_ends.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, Recorder)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.add(one.untyped_storage().data_ptr())
        # a function's globals are its module
        open_ends += [part for part in gc.get_referents(one) if part is not getattr(one, "__globals__", None)]
    return found - {0}


@pytest.mark.parametrize("layout", ["A", "B", "C", "D"])
def test_a_job_of_the_writer_reaches_nothing_but_its_buffer_and_its_own_copy_of_the_ids(
    tmp_path: Path, layout: str
) -> None:
    model = Model(layout)
    recorder = capture(model, tmp_path)
    held = held_jobs(recorder)
    wish(tmp_path, PROMPTS, "ranks")
    given = batch(PROMPTS)
    # everything else that the forward works with
    lent: List[torch.Tensor] = [given.input_ids, *model.parameters()]
    for module in model.modules():
        module.register_forward_hook(
            lambda module, args, output: lent.extend(
                part
                for part in [*args, *(output if isinstance(output, tuple) else [output])]
                if isinstance(part, torch.Tensor)
            )
        )
    forward(model, given)
    (job,) = held
    (ids,) = {dump.pieces.args[1].ids.untyped_storage().data_ptr() for dump in job.dumps}  # type: ignore[attr-defined]
    reached = storages(job)
    assert reached == {job.slot.host.untyped_storage().data_ptr(), ids}
    assert not reached & {tensor.untyped_storage().data_ptr() for tensor in lent}


def test_a_job_that_waits_keeps_no_device_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("D")
    recorder = capture(model, tmp_path)
    held = held_jobs(recorder)
    wish(tmp_path, PROMPTS[:1], "ranks")
    pool = recorder.pool
    take, areas = pool.take, []

    def take_apart(size: int) -> Any:
        """As on CUDA: the forward copies to another memory than the writer reads."""
        slot = take(size)
        slot.area = torch.empty_like(slot.host)
        areas.append(slot.area.untyped_storage().data_ptr())
        return slot

    def send(slot: Any, size: int) -> None:
        slot.host[:size].copy_(slot.area[:size])
        slot.area = slot.host

    monkeypatch.setattr(pool, "take", take_apart)
    monkeypatch.setattr(pool, "send", send)
    forward(model, batch(PROMPTS[:1]))
    assert areas and not storages(held[0]) & set(areas)


def test_a_writer_that_comes_after_the_next_batch_finds_what_the_forward_was(tmp_path: Path) -> None:
    model = Model("D")
    recorder = capture(model, tmp_path)
    put, held = recorder.writer.put, held_jobs(recorder)
    names = wish(tmp_path, PROMPTS)
    given = batch(PROMPTS)
    forward(model, given)
    # the next batch, into the same buffers
    given.input_ids.copy_(given.input_ids.flip(0) + 20)
    given.extend_seq_lens_cpu[:] = [2, 5, 2]
    given.extend_prefix_lens_cpu[:] = [1, 1, 1]
    forward(model, given)
    put(held[0])
    for _ in range(2):
        recorder.pool._free.get(timeout=60)
    for ids, name in zip(PROMPTS, names, strict=True):
        states, _, normed = model.reference(ids)
        dump = load_file(str(tmp_path / "done" / (name + ".safetensors")))
        assert dump["token_ids"].tolist() == ids
        assert torch.allclose(dump["hidden_states"][:, 0], states[1], atol=1e-5)
        assert torch.allclose(dump["final_post_norm"], normed, atol=1e-5)


def test_a_buffer_comes_back_when_nobody_reads_it_any_more_also_after_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    computed, still_reading = tensorfile.zlib.crc32, []

    def slow(block: Any, start: int = 0) -> int:
        reading.set()
        still_reading.append(1)
        go_on.wait(60)
        still_reading.pop()
        return computed(block, start)

    def full(fd: int, data: Any) -> int:
        reading.wait(60)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorfile, "BLOCK", 4)
    monkeypatch.setattr(tensorfile.zlib, "crc32", slow)
    monkeypatch.setattr(tensorfile, "_write_all", full)
    ended: List[int] = []

    def write() -> None:
        with pytest.raises(OSError):
            tensorfile.write_summed(tmp_path / "dump", lambda crc: b"12345678", [b"0123456789ab"], summers)
        ended.append(len(still_reading))

    with ThreadPoolExecutor(1) as summers:
        writer = threading.Thread(target=write)
        writer.start()
        assert reading.wait(60)
        writer.join(0.5)  # long enough for one that does not wait
        go_on.set()
        writer.join(60)
    assert ended == [0]


def test_a_forward_that_cannot_be_handed_over_is_told_and_its_buffer_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model("B")
    recorder = capture(model, tmp_path, buffers=1)
    (name,) = wish(tmp_path, PROMPTS[:1])

    def refused(job: Job) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(recorder.writer, "put", refused)
    forward(model, batch(PROMPTS[:1]))
    assert "new thread" in (tmp_path / "failed" / (name + ".json")).read_text()
    assert recorder.current is None and recorder.pool._free.qsize() == 1
