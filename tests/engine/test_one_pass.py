"""What was made fast must find what the slow way finds: rows that are counted without being made, states looked at in one pass, checksums in parts."""

from __future__ import annotations

import json
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from sglang_hs import dataset
from sglang_hs.dataset import Limits, Row
from sglang_hs_capture import tensorfile
from sglang_hs_client import dumpfile

LIMITS = Limits(vocab_size=100, max_prompt=8, cut_to=6)
WORDS = [
    b"true", b"null", b"1.0", b"1e1", b"-1", b"-0", b"99", b"100", b"01", b"[1]", b"[]", b'"1"', b"{}", b"\xff", b"\xc3\xa4",
    b"NaN", b"9223372036854775808", b",", b"]", b'"', b"\\ud800", b"\x01", b" ",
]  # fmt: skip
LINES = [
    b'{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "seq_len": 3}',
    b'{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9], "loss_mask": null, "text": "a\xc3\xa4"}',
    b'{"loss_mask": [1], "input_ids": [99]}',
]


def test_a_counted_line_is_a_row_that_check_takes() -> None:
    pytest.importorskip("msgspec")
    rng = random.Random(0)
    counted = 0
    for _ in range(20000):
        line = bytearray(rng.choice(LINES))
        for _ in range(rng.randrange(3)):
            place = rng.randrange(len(line))
            line[place : place + rng.randrange(4)] = rng.choice(WORDS)
        told = dataset._brief(bytes(line), LIMITS)
        if told is None:
            continue
        counted += 1
        row = dataset.check(
            0, "", dataset._record(0, "", bytes(line), dataset._Source(dataset._parse, dataset._brief)), LIMITS
        )
        assert isinstance(row, Row), (bytes(line), row)
        assert told[1] == (row.loss_mask is not None) and min(told[0], 6) == len(row.input_ids), (
            bytes(line),
            told,
            row,
        )
    assert counted > 5000  # the quick way is taken


def test_a_counted_arrow_row_is_a_row_that_check_takes() -> None:
    pa = pytest.importorskip("pyarrow")
    kinds = [pa.int64(), pa.int32(), pa.uint8(), pa.float32(), pa.bool_(), pa.list_(pa.int64())]
    rng = random.Random(0)
    counted = 0
    for _ in range(3000):
        columns: Dict[str, Any] = {}
        for name, most in (("input_ids", 101), ("loss_mask", 2)):
            kind = rng.choice(kinds if rng.random() < 0.5 else kinds[:3])
            values: List[Any] = [rng.randrange(most) for _ in range(rng.choice((0, 1, 3, 3, 3, 9)))]
            if kind == kinds[4]:
                values = [bool(value) for value in values]
            if kind == kinds[5]:
                values = [values]
            if rng.random() < 0.1 and values:
                values[rng.randrange(len(values))] = None
            outer = rng.choice((pa.list_, pa.large_list))
            columns[name] = pa.array([values if rng.random() < 0.95 else None], outer(kind))
        columns["seq_len"] = pa.array([rng.choice((None, 3))])
        (row,) = dataset._batches([pa.record_batch(columns)])
        told = row[3].brief(row[2], LIMITS)
        if told is None:
            continue
        counted += 1
        made = dataset.check(0, "", row[3].parse(row[2]), LIMITS)
        assert isinstance(made, Row), (columns, made)
        assert told[1] == (made.loss_mask is not None) and min(told[0], 6) == len(made.input_ids), (columns, told)
    assert counted > 300


def test_a_scan_is_the_same_with_and_without_the_quick_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "d.jsonl"
    lines = [
        *LINES,
        b"",
        b"{",
        b'{"input_ids": [100]}',
        b'{"input_ids": [1], "t": "\xff"}',
        json.dumps({"input_ids": [7] * 20}).encode(),
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    quick = dataset.scan(path, 100, 8, 6).facts()
    monkeypatch.setattr(dataset, "_brief", lambda line, limits: None)
    assert dataset.scan(path, 100, 8, 6).facts() == quick
    assert quick["samples"] == 4 and quick["bad_total"] == 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_pass_finds_each_value_that_is_not_finite_wherever_it_lies(dtype: torch.dtype) -> None:
    for size in (1, 7, 64, 1000, 4097):
        for place in {0, size // 2, size - 1}:
            for value in (float("nan"), float("inf"), -float("inf")):
                values = torch.randn(size).to(dtype)
                assert dumpfile._look(values) == (True, True)
                values[place] = value
                assert not dumpfile._look(values)[0], (size, place, value)
            values = torch.zeros(size).to(dtype)
            assert dumpfile._look(values) == (True, False)
            for value in (1.0, -1.0):
                values[place] = value
                assert dumpfile._look(values) == (True, True)


def test_a_file_whose_checksum_is_made_beside_has_the_checksum_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorfile, "BLOCK", 100)
    rng = random.Random(0)
    with ThreadPoolExecutor(2) as summers:
        for sizes in ((), (0,), (1,), (100,), (101, 0, 99), (1000, 7), (350, 350, 1)):
            pieces = [rng.randbytes(size) for size in sizes]
            tensorfile.write_summed(tmp_path / "file", lambda crc: b"<" + crc.encode() + b">", list(pieces), summers)
            data = b"".join(pieces)
            assert (tmp_path / "file").read_bytes() == b"<%08x>" % zlib.crc32(data) + data
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("before", [0, 3, 108, 500])
def test_a_file_written_over_a_used_one_is_that_file_and_no_byte_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    monkeypatch.setattr(tensorfile, "BLOCK", 40)
    data, used = random.Random(1).randbytes(100), tmp_path / "used"
    with ThreadPoolExecutor(2) as summers:
        for gone in (False, True):  # somebody else may have taken it
            if not gone:
                used.write_bytes(b"\xff" * before)
            inode = None if gone else used.stat().st_ino
            tensorfile.write_summed(tmp_path / "file", lambda crc: crc.encode(), [data], summers, used)
            assert (tmp_path / "file").read_bytes() == b"%08x" % zlib.crc32(data) + data
            assert [path.name for path in tmp_path.iterdir()] == ["file"]
            assert gone or (tmp_path / "file").stat().st_ino == inode


def test_a_copy_that_differs_anywhere_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dumpfile, "BLOCK", 64)
    one, other = tmp_path / "one", tmp_path / "other"
    for size in (0, 1, 64, 65, 200):
        data = bytearray(random.Random(size).randbytes(size))
        one.write_bytes(data)
        other.write_bytes(data)
        assert dumpfile.same_bytes(one, other)
        for changed in (bytes(data) + b"x", bytes(data[:-1]) if data else b"y"):
            other.write_bytes(changed)
            assert not dumpfile.same_bytes(one, other) and not dumpfile.same_bytes(other, one)
        for place in {0, size // 2, size - 1} if size else set():
            other.write_bytes(bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :]))
            assert not dumpfile.same_bytes(one, other)


def test_a_dump_has_the_ids_of_its_forward_whatever_the_engine_does_with_its_tensor_before_they_are_written(
    tmp_path: Path,
) -> None:
    from fake_engine import Model, batch, capture
    from safetensors.torch import load_file
    from sglang_hs.dataset import sequence_name

    model = Model("D")
    recorder = capture(model, tmp_path)
    held: List[Any] = []
    put, recorder.writer.put = recorder.writer.put, held.append  # type: ignore[method-assign]
    name = sequence_name([1, 2, 3])
    (tmp_path / "want" / name).write_text("")
    forward = batch([[1, 2, 3]])
    with torch.no_grad():
        model(forward.input_ids, None, forward)
    forward.input_ids.fill_(7)
    put(held[0])
    recorder.pool._free.get(timeout=60), recorder.pool._free.get(timeout=60)
    assert load_file(str(tmp_path / "done" / (name + ".safetensors")))["token_ids"].tolist() == [1, 2, 3]
