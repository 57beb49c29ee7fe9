"""The data set's reader: every fault in one line, cuts, counts, and the name that the capture computes too."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any, List

import pytest
from sglang_hs import dataset
from sglang_hs.dataset import BadRow, Limits, Row
from sglang_hs.errors import HsError

LIMITS = Limits(vocab_size=100, max_prompt=8)


def write(path: Path, lines: List[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_name_is_sha256_of_little_endian_int64() -> None:
    ids = [1, 2, 163839]
    assert dataset.sequence_name(ids) == hashlib.sha256(struct.pack("<3q", *ids)).hexdigest()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{oops", "d.jsonl:1: not JSON"),
        ("[1, 2]", "not an object with input_ids but list"),
        ('{"text": "x"}', "no input_ids (it has: text)"),
        ('{"input_ids": null}', "no input_ids"),
        ('{"input_ids": "12"}', "input_ids is not a list but str"),
        ('{"input_ids": []}', "input_ids is empty"),
        ('{"input_ids": [1, 2.5]}', "input_ids[1] is not an integer but float 2.5"),
        ('{"input_ids": [1, true]}', "input_ids[1] is not an integer but bool"),
        ('{"input_ids": [[1, 2]]}', "input_ids[0] is not an integer but list"),
        ('{"input_ids": [1, 100]}', "input_ids[1] is 100, outside the vocabulary of 100"),
        ('{"input_ids": [-1]}', "input_ids[0] is -1, outside the vocabulary"),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "loss_mask has 1 entries for 2 input_ids"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 2]}', "loss_mask[1] is 2, neither 0 nor 1"),
        ('{"input_ids": [1], "loss_mask": 1}', "loss_mask is not a list"),
        ('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}', "9 tokens, the server takes 8"),
    ],
)
def test_each_fault_has_one_clear_line(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "d.jsonl", [line])
    (row,) = dataset.rows(path, LIMITS)
    assert isinstance(row, BadRow)
    assert reason in str(row)
    assert str(row).startswith("d.jsonl:1: ")
    assert "\n" not in str(row)


def test_rows_keep_their_number_past_empty_lines_and_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [1]}, "", "{oops", {"input_ids": [2], "loss_mask": [1]}])
    first, second, third = dataset.rows(path, LIMITS)
    assert first == Row(0, [1], None)
    assert isinstance(second, BadRow) and second.idx == 1 and second.where == "d.jsonl:3"
    assert third == Row(2, [2], [1])


def test_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"input_ids": [1], "text": "\xff"}\n')
    (row,) = dataset.rows(path, LIMITS)
    assert isinstance(row, BadRow) and "not UTF-8" in row.reason


def test_scan_sums_up(tmp_path: Path) -> None:
    rows = [
        {"input_ids": list(range(10)), "loss_mask": [1] * 10},
        {"input_ids": [1, 2]},
        {"input_ids": [1, 2]},
        "{",
        "{",
    ]
    path = write(tmp_path / "d.jsonl", rows)
    found = dataset.scan(path, 100, 8, cut_to=4, limit_bad=1)
    assert (found.samples, found.tokens) == (3, 8)
    assert (found.cut, found.masked, found.min_length, found.max_length) == (1, 1, 2, 4)
    assert found.hist == {4: 1, 2: 2}
    assert len(found.bad) == 1 and found.bad_total == 2
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest() == dataset.digest(path)
    json.dumps(found.facts())


def test_cut_applies_to_the_mask_too(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": list(range(10)), "loss_mask": [0, 1] * 5}])
    assert list(dataset.rows(path, Limits(100, 8, cut_to=3))) == [Row(0, [0, 1, 2], [0, 1, 0])]


@pytest.mark.parametrize("make", ["missing", "empty_folder", "empty_file", "splits"])
def test_no_such_data_set_is_told(tmp_path: Path, make: str) -> None:
    path = tmp_path / "data"
    if make == "empty_folder":
        path.mkdir()
    elif make == "empty_file":
        path.write_text("\n")
    elif make == "splits":
        (path / "train").mkdir(parents=True)
        (path / "dataset_dict.json").write_text("{}")
    with pytest.raises(HsError) as caught:
        dataset.scan(path, 100, 8)
    assert str(path) in caught.value.what
    assert caught.value.next


def test_parquet_without_pyarrow_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    path = tmp_path / "d.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(HsError, match="needs pyarrow"):
        dataset.scan(path, 100, 8)


def test_parquet_and_arrow_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"input_ids": [[1, 2], [3]], "loss_mask": [[0, 1], None], "other": ["a", "b"]})
    parquet.write_table(table, str(tmp_path / "d.parquet"))
    folder = tmp_path / "arrow"
    folder.mkdir()
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    expected = [Row(0, [1, 2], [0, 1]), Row(1, [3], None)]
    assert list(dataset.rows(tmp_path / "d.parquet", LIMITS)) == expected
    assert list(dataset.rows(folder, LIMITS)) == expected


def test_memory_stays_flat(tmp_path: Path) -> None:
    import tracemalloc

    def peak(count: int) -> int:
        path = tmp_path / "{}.jsonl".format(count)
        write(path, [{"input_ids": list(range(i % 90, i % 90 + 8))} for i in range(count)])
        tracemalloc.start()
        for _ in dataset.rows(path, LIMITS):
            pass
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(10)
    assert peak(20000) < peak(200) + 50000


def test_rows_that_are_not_wanted_are_passed_over_unparsed(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [1]}, "{", {"input_ids": [2]}, {"input_ids": [3]}])
    asked = []

    def wanted(idx: int) -> bool:
        asked.append(idx)
        return idx >= 2

    assert list(dataset.rows(path, LIMITS, wanted)) == [Row(2, [2], None), Row(3, [3], None)]
    assert asked == [0, 1, 2, 3]
