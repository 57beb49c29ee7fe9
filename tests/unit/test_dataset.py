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


def save_to_disk(folder: Path, table: Any, files: int = 2) -> Path:
    """A folder as datasets' save_to_disk leaves it: shards in stream format, state.json naming them in order, dataset_info.json."""
    import pyarrow

    folder.mkdir()
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        begin, end = (table.num_rows * edge // files for edge in (number, number + 1))
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table.slice(begin, end - begin), max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": "torch", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_an_arrow_folder_is_read_shard_by_shard_with_the_same_checks(tmp_path: Path) -> None:
    import pyarrow

    good: dict[str, list[Any]] = {
        "input_ids": [[1, 2], [3], [4, 5, 6], [7]],
        "loss_mask": [[0, 1], [1], [1, 0, 1], [0]],
        "seq_len": [2, 1, 3, 1],
    }
    path = save_to_disk(tmp_path / "good", pyarrow.table({**good, "messages": ["a", "b", "c", "d"]}), files=3)
    ids, masks = good["input_ids"], good["loss_mask"]
    assert list(dataset.rows(path, LIMITS)) == [Row(idx, ids[idx], masks[idx]) for idx in range(4)]
    bad = pyarrow.table(
        {"input_ids": [[1, 2], None, [], [1, 100]], "loss_mask": [[1], [1], [], [1, 1]], "seq_len": [2, 1, 0, 2]}
    )
    told = [str(row) for row in dataset.rows(save_to_disk(tmp_path / "bad", bad), LIMITS)]
    assert told == [
        "data-00000-of-00002.arrow row 0: loss_mask has 1 entries for 2 input_ids",
        "data-00000-of-00002.arrow row 1: no input_ids (it has: loss_mask, seq_len)",
        "data-00001-of-00002.arrow row 0: input_ids is empty",
        "data-00001-of-00002.arrow row 1: input_ids[1] is 100, outside the vocabulary of 100 (another tokenizer?)",
    ]


def test_a_seq_len_that_is_not_the_length_is_a_bad_row(tmp_path: Path) -> None:
    import pyarrow

    table = pyarrow.table({"input_ids": [[1, 2], [3, 4]], "seq_len": [2, 9]})
    first, second = dataset.rows(save_to_disk(tmp_path / "d", table), LIMITS)
    assert first == Row(0, [1, 2], None)
    assert "seq_len is 9 for 2 input_ids" in str(second)


@pytest.mark.parametrize("kind", ["int32", "uint16", "large", "fixed", "bool mask", "[1, T]"])
def test_tensor_columns_are_rows_of_numbers(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    ids: Any = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32() if kind == "int32" else pa.uint16()))
    mask: Any = pa.array([[0, 1], [1, 1]], pa.list_(pa.int8()))
    if kind == "large":
        ids = pa.array([[1, 2], [3, 4]], pa.large_list(pa.int64()))
    elif kind == "fixed":
        ids = pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))
    elif kind == "bool mask":
        mask = pa.array([[False, True], [True, True]])
    elif kind == "[1, T]":
        ids, mask = pa.array([[[1, 2]], [[3, 4]]]), pa.array([[[0, 1]], [[1, 1]]])
    path = save_to_disk(tmp_path / "d", pa.table({"input_ids": ids, "loss_mask": mask}))
    assert list(dataset.rows(path, LIMITS)) == [Row(0, [1, 2], [0, 1]), Row(1, [3, 4], [1, 1])]


def test_several_rows_in_one_are_no_row(tmp_path: Path) -> None:
    import pyarrow

    path = save_to_disk(tmp_path / "d", pyarrow.table({"input_ids": [[[1, 2], [3, 4]]]}), files=1)
    (row,) = dataset.rows(path, LIMITS)
    assert isinstance(row, BadRow) and "input_ids[0] is not an integer but list" in row.reason


def test_the_digest_of_an_arrow_folder_is_over_its_data_files(tmp_path: Path) -> None:
    import pyarrow

    one, other = (
        save_to_disk(tmp_path / name, pyarrow.table({"input_ids": [[1, 2], [3, last]]}))
        for name, last in (("one", 4), ("other", 5))
    )
    before = dataset.digest(one)
    (one / "dataset_info.json").write_text('{"description": "another"}')
    (one / "cache-1.arrow").write_bytes(b"of datasets' own")
    assert dataset.digest(one) == before != dataset.digest(other)


@pytest.mark.parametrize("how", ["cut", "foreign", "gone", "state"])
def test_a_torn_arrow_folder_is_one_message(tmp_path: Path, how: str) -> None:
    import pyarrow

    path = save_to_disk(tmp_path / "d", pyarrow.table({"input_ids": [[number] * 8 for number in range(90)]}))
    shard = path / "data-00001-of-00002.arrow"
    if how == "cut":
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    elif how == "foreign":
        shard.write_bytes(b"no arrow at all")
    elif how == "gone":
        shard.unlink()
    else:
        (path / "state.json").write_text("{}")
    with pytest.raises(HsError) as caught:
        dataset.scan(path, 100, 8)
    assert ("state.json" if how == "state" else shard.name) in caught.value.what and caught.value.next


def test_the_plan_takes_an_arrow_folder(tmp_path: Path) -> None:
    import pyarrow
    from sglang_hs import plan

    path = save_to_disk(tmp_path / "d", pyarrow.table({"input_ids": [[1, 2, 3], [4]], "seq_len": [3, 1]}))
    settings = {
        "dataset": str(path),
        "model": {"vocab_size": 100, "hidden_size": 8, "itemsize": 2},
        "max_prompt": 8,
        "cut_to": None,
        "boundaries": [1, 2],
        "final": "both",
        "output_dir": str(tmp_path / "out"),
        "dump_dir": str(tmp_path / "dumps"),
        "state_dir": str(tmp_path / "state"),
        "in_flight": 1,
        "tokens_per_forward": 0,
    }
    found = plan.look(settings, False, 0.0)
    assert (found["samples"], found["tokens"], found["bytes"]) == (2, 4, 4 * (4 * 8 * 2 + 8))
    assert found["arrow"] is True


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
