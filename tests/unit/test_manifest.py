"""The book of an output folder: identity, states, counts, and what survives a killed writer."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sglang_hs.errors import HsError
from sglang_hs.manifest import FILE, Manifest

IDENTITY = {"dataset_sha256": "d", "boundaries": [3, 31, 59], "final": "pre_norm"}


def book(folder: Path, lag: float = 0.0) -> Manifest:
    return Manifest(folder, lag)


def test_a_folder_belongs_to_what_it_was_made_with(tmp_path: Path) -> None:
    first = book(tmp_path)
    assert first.claim(IDENTITY) is True
    first.close()
    second = book(tmp_path)
    assert second.claim(dict(IDENTITY, boundaries=(3, 31, 59))) is False
    with pytest.raises(HsError, match=r"boundaries: the folder has \[3, 31, 59\], this run \[2, 30, 58\]"):
        second.claim(dict(IDENTITY, boundaries=[2, 30, 58]))
    assert second.identity() == IDENTITY
    second.close()


def test_states_and_counts(tmp_path: Path) -> None:
    manifest = book(tmp_path)
    manifest.add([(0, "a", 10, None), (1, "b", 20, None), (2, None, 0, "not JSON"), (3, "a", 10, None)])
    manifest.add([(0, "z", 99, None)])  # known rows stay as they are
    manifest.done(0, "hidden_states/hs_0.safetensors", 1000, "f" * 64, 2)
    manifest.failed(1, "no answer", 4)
    counts = manifest.counts()
    assert counts == {
        "total": 4, "pending": 1, "done": 1, "failed": 1, "bad": 1,
        "tokens_total": 40, "tokens_done": 10, "bytes_done": 1000,
    }  # fmt: skip
    twin = manifest.done_as("a")
    assert twin is not None and twin.idx == 0 and twin.attempts == 2
    assert manifest.done_as("b") is None
    assert [sample.idx for sample in manifest.samples()] == [0, 1, 2, 3]
    assert [sample.idx for sample in manifest.samples("bad")] == [2]
    assert manifest.retry_failed() == 1
    manifest.again(0)
    assert manifest.counts()["pending"] == 3
    manifest.close()


def test_paging_sees_every_sample_once_while_states_change(tmp_path: Path) -> None:
    manifest = book(tmp_path)
    manifest.add((idx, str(idx), 1, None) for idx in range(25))
    seen = []
    for sample in manifest.samples("pending", page=7):
        manifest.done(sample.idx, "f", 1, "s")
        seen.append(sample.idx)
    assert seen == list(range(25))
    manifest.close()


def test_changes_are_grouped_and_close_commits(tmp_path: Path) -> None:
    manifest = book(tmp_path, lag=3600)
    manifest.add([(0, "a", 1, None)])
    other = sqlite3.connect(str(tmp_path / FILE))
    assert other.execute("SELECT COUNT(*) FROM samples").fetchone() == (0,)
    manifest.close()
    assert other.execute("SELECT COUNT(*) FROM samples").fetchone() == (1,)
    other.close()
    assert os.listdir(str(tmp_path)) == [FILE]  # no -wal, no -shm, no journal left


def test_many_threads(tmp_path: Path) -> None:
    manifest = book(tmp_path, lag=0.01)
    manifest.add((idx, str(idx), 1, None) for idx in range(200))

    def finish(first: int) -> None:
        for idx in range(first, 200, 8):
            manifest.done(idx, "f", 2, "s")
            assert manifest.sample(idx).state == "done"  # type: ignore[union-attr]

    threads = [threading.Thread(target=finish, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert manifest.counts()["bytes_done"] == 400
    manifest.close()


def test_a_killed_writer_leaves_a_whole_book(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from sglang_hs.manifest import Manifest\n"
        "m = Manifest(Path(sys.argv[1]), 0.0); m.claim({'a': 1}); m.add([(0, 'x', 1, None)]); m.commit()\n"
        "m._lag = 3600; m.done(0, 'f', 1, 's'); os.kill(os.getpid(), 9)\n"
    )
    root = str(Path(__file__).resolve().parents[2] / "module_utils")
    code = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env={"PYTHONPATH": root}).returncode
    assert code == -9
    manifest = book(tmp_path)
    assert manifest.identity() == {"a": 1}
    assert manifest.counts()["pending"] == 1
    manifest.close()


def test_read_only_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(HsError):
        Manifest(tmp_path, read_only=True)
    assert os.listdir(str(tmp_path)) == []
    book(tmp_path).close()
    before = (tmp_path / FILE).stat().st_mtime_ns
    manifest = Manifest(tmp_path, read_only=True)
    assert manifest.counts()["total"] == 0
    manifest.close()
    assert (tmp_path / FILE).stat().st_mtime_ns == before


def test_a_file_that_is_no_book_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(HsError, match="cannot be opened"):
        book(tmp_path)


def test_many_rows_stay_cheap(tmp_path: Path) -> None:
    manifest = book(tmp_path, lag=3600)
    manifest.add((idx, None, 5, None) for idx in range(100000))
    assert manifest.counts()["tokens_total"] == 500000
    manifest.close()


def test_pages_of_one_state_do_not_sort_all_of_them(tmp_path: Path) -> None:
    """Steps of SQLite's machine for ten times the rows: about ten times as many, not a hundred times."""
    steps = []
    for count in (1000, 10000):
        folder = tmp_path / str(count)
        folder.mkdir()
        manifest = book(folder, 3600)
        manifest.add((idx, "name", 5, None) for idx in range(count))
        for idx in range(count):
            manifest.done(idx, "file", 1, "sum")
        taken = [0]

        def tick(taken: list[int] = taken) -> int:
            taken[0] += 1
            return 0

        manifest._db.set_progress_handler(tick, 100)
        assert sum(1 for _ in manifest.samples("done", page=100)) == count
        manifest.close()
        steps.append(taken[0])
    assert steps[1] < 20 * steps[0], steps


def test_the_longest_sample(tmp_path: Path) -> None:
    manifest = book(tmp_path)
    assert manifest.longest() is None
    manifest.add([(0, "a", 10, None), (1, "b", 20, None), (2, None, 0, "bad"), (3, "c", 20, None)])
    assert manifest.longest() == 1
    manifest.close()


def test_what_was_moved_is_in_the_book_and_nowhere_else(tmp_path: Path) -> None:
    manifest = book(tmp_path, lag=3600)
    manifest.add((idx, "twin" if idx in (1, 4) else str(idx), 10, None) for idx in range(6))
    for idx in range(5):
        manifest.done(idx, f"hidden_states/hs_{idx}.safetensors", 100, "s" * 64)
    manifest.moved("far:a", [0, 1, 5])  # 5 is not finished: it cannot have been moved
    other = Manifest(tmp_path, read_only=True)  # durable at once, whatever the lag
    assert [sample.idx for sample in other.waiting(page=2)] == [2, 3, 4]
    assert [(idx, file is None) for idx, file, *_ in other.done_files(page=2)] == [
        (0, True), (1, True), (2, False), (3, False), (4, False),
    ]  # fmt: skip
    assert other.moved_to(1) == ("far:a", "hidden_states/hs_1.safetensors", False) and other.moved_to(2) is None
    assert list(other.moved_here()) == [(idx, f"hidden_states/hs_{idx}.safetensors", 10) for idx in (0, 1)]
    twin = other.done_as("twin")
    assert twin is not None and twin.idx == 4  # whose file is here
    assert other.counts()["done"] == 5
    other.close()
    manifest.again(0)
    assert manifest.moved_counts() == {"moved": 1, "bytes_moved": 100, "roots": {"far:a": 1}, "archives": 0}
    manifest.close()


def test_an_archive_is_planned_before_it_is_sent_and_never_twice_by_one_name(tmp_path: Path) -> None:
    manifest = book(tmp_path)
    manifest.add((idx, str(idx), 10, None) for idx in range(4))
    for idx in range(4):
        manifest.done(idx, f"hidden_states/hs_{idx}.safetensors", 100, "s" * 64)
    first = manifest.plan_archive("far:a", "hidden_states-", [3, 0])
    assert (first.file, first.members) == ("hidden_states-000000.safetensors", (0, 3))
    assert manifest.archives("planned", "far:a") == [first] and manifest.archives("planned", "far:b") == []
    manifest.moved("far:a", first.members, (first.id, 250, "a" * 64))
    assert manifest.moved_to(3) == ("far:a", "hidden_states-000000.safetensors", True)
    second = manifest.plan_archive("far:a", "hidden_states-", [1])
    manifest.drop_archive(second.id)
    assert [found.file for found in manifest.archives("dropped")] == ["hidden_states-000001.safetensors"]
    manifest.drop_archive(second.id, gone=True)
    third = manifest.plan_archive("far:a", "hidden_states-", [1, 2])
    assert third.file == "hidden_states-000002.safetensors"
    assert manifest.moved_counts()["archives"] == 1
    manifest.close()


def test_a_book_of_before_there_were_remotes_is_read(tmp_path: Path) -> None:
    manifest = book(tmp_path)
    manifest.add([(0, "a", 10, None)])
    manifest.done(0, "f", 1, "s")
    for table in ("remotes", "moved", "archives"):
        manifest._db.execute(f"DROP TABLE {table}")
    manifest.close()
    old = Manifest(tmp_path, read_only=True)
    assert [sample.idx for sample in old.waiting()] == [0] and old.moved_counts()["moved"] == 0
    assert [file for _, file, *_ in old.done_files()] == ["f"] and old.moved_to(0) is None
    assert old.archives("moved") == [] and list(old.moved_here()) == []
    old.close()


@pytest.mark.parametrize("pages", range(14, 40, 3))
def test_a_disk_that_fills_in_the_middle_is_told_and_the_book_goes_on(tmp_path: Path, pages: int) -> None:
    """SQLite takes a transaction back by itself when it finds no room: nobody may be told of that instead of the disk."""
    manifest = book(tmp_path, lag=3600)
    manifest.claim(IDENTITY)
    manifest._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.Error, match="full"):
        for idx in range(100_000):
            manifest.add([(idx, "x" * 64, 10, None)])
    manifest._db.execute("PRAGMA max_page_count = 100000")
    manifest.add([(100_000, "y", 10, None)])
    manifest.commit()
    known = manifest.counts()["total"]
    manifest.close()
    again = book(tmp_path)
    assert (again.counts()["total"], again.identity()) == (known, IDENTITY)
    again.close()
