"""The norms that the client keeps of each sample are those of the rows that it says, and cost next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import List

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sglang_hs.manifest import Manifest
from sglang_hs_client import norms
from sglang_hs_client.dumpfile import read_header
from test_client_run import ROWS, Setup


def written(folder: Path, length: int, dtype: torch.dtype, **more: torch.Tensor) -> Path:
    torch.manual_seed(length)
    tensors = {"token_ids": torch.arange(length), "hidden_states": torch.randn(length, 3, 16).to(dtype), **more}
    save_file(tensors, str(folder / "dump.safetensors"))
    return folder / "dump.safetensors"


@pytest.mark.parametrize(
    "length,rows",
    [(1, [0]), (5, [2]), (64, [32]), (130, [32, 97]), (4096, [256, 768, 1280, 1792, 2304, 2816, 3328, 3840])],
)
def test_a_row_in_64_eight_at_most_and_the_first_only_where_it_is_the_only_one(length: int, rows: List[int]) -> None:
    assert norms.chosen(length) == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_norm_of_these_rows(tmp_path: Path, dtype: torch.dtype) -> None:
    path = written(tmp_path, 700, dtype, final_post_norm=torch.full((700, 16), 2.0).to(dtype))
    with safe_open(str(path), framework="pt") as handle:
        hidden = handle.get_tensor("hidden_states").to(torch.float32)
    wanted = hidden[norms.chosen(700)].norm(dim=-1).mean(0).tolist()
    found = norms.measure(path, read_header(path))
    assert found is not None
    assert found[:3] == pytest.approx(wanted, rel=1e-5)
    assert found[3] == pytest.approx(8.0)  # of 16 values of 2


def test_a_file_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    path = written(tmp_path, 70, torch.float32)
    header = read_header(path)
    assert norms.measure(path, header) is not None
    path.write_bytes(path.read_bytes()[:4000])
    assert norms.measure(path, header) is None
    assert norms.measure(tmp_path / "gone", header) is None


def test_a_run_keeps_them_for_every_sample_twins_too(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    try:
        code, _ = setup.run()
    finally:
        setup.engine.close()
    assert code == 0
    book = Manifest(setup.output, read_only=True)
    kept = list(book.norms())
    assert len(kept) == len(ROWS)
    for idx, values in enumerate(kept):
        path = setup.output / f"hidden_states/hs_{idx}.safetensors"
        assert values == pytest.approx(norms.measure(path, read_header(path)), rel=1e-6)
    assert kept[2] == kept[11] == kept[17]
    assert len({values for values in kept}) > 10
    book.close()
