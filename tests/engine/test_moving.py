"""The client whose output is larger than its disk: finished samples move on by real rclone, the mark holds it back, nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest
from sglang_hs import moving
from sglang_hs.manifest import Manifest
from sglang_hs_client import extract
from sglang_hs_client.run import Run
from sglang_hs_client.spec import parse
from test_client_run import ROWS, Setup

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import far as remotes


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "LINGER", 0.05)
    monkeypatch.setattr(moving, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(moving, "LONGEST_PAUSE", 0.5)


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.engine.close()


def move(place: Path, **more: Any) -> Dict[str, Any]:
    return {"to": str(place), "rclone": str(remotes.program()), **more}


def at_far(place: Path) -> List[str]:
    folder = place / "hidden_states"
    return sorted(os.listdir(str(folder))) if folder.is_dir() else []


def rest_moved(setup: Setup, place: Path, **more: Any) -> None:
    """What a run leaves when it ends goes, without a server."""
    book = Manifest(setup.output)
    mover = moving.Mover(setup.output, book, moving.Move.of(move(place, **more)))
    mover.start(drain=True)
    assert mover.join(60), mover.status()
    book.close()


def check(setup: Setup, place: Path, count: int = len(ROWS)) -> None:
    """Every sample is at the far end once, by the book's checksum, and none is here."""
    assert at_far(place) == sorted("hs_{}.safetensors".format(idx) for idx in range(count))
    assert os.listdir(str(setup.output / "hidden_states")) == []
    book = Manifest(setup.output, read_only=True)
    assert book.counts()["done"] == count and book.moved_counts()["moved"] == count
    for sample in book.samples():
        data = (place / str(sample.file)).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sample.sha256
    book.close()


def test_an_output_larger_than_its_room_is_complete_at_the_far_end(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "nfs"
    most: List[int] = []
    real = moving.Mover.offer

    def offer(self: moving.Mover, idx: int, size: int) -> None:
        real(self, idx, size)
        most.append(self.status()["bytes_waiting"])

    monkeypatch.setattr(moving.Mover, "offer", offer)
    limit = 40_000  # four prompts of some 10,000 bytes, the room that a file's header is given included
    code, result = setup.run(move=move(place, high_water="{:.9f}".format(limit / 1e9)))
    assert (code, result["outcome"]) == (0, "complete"), result
    assert max(most) <= limit < result["counts"]["bytes_done"]
    assert result["moving"]["held_s"] > 0 and result["moving"]["moved"] > 0
    assert "samples are at {}".format(place) in result["message"]
    lines = [json.loads(line) for line in (setup.output / "samples.jsonl").read_text().splitlines()]
    assert [line["idx"] for line in lines] == list(range(len(ROWS)))  # of all, wherever they are
    rest_moved(setup, place)
    check(setup, place)
    code, again = setup.run(move=move(place))  # they are done: not one request
    assert (code, again["tokens_this_run"]) == (0, 0)
    assert at_far(place) == sorted("hs_{}.safetensors".format(idx) for idx in range(len(ROWS)))


def test_a_remote_that_fails_holds_the_run_back_and_takes_nothing_of_its_budget(setup: Setup, tmp_path: Path) -> None:
    made = remotes.Far(tmp_path / "remote", "sftp")
    ended: List[Tuple[int, Dict[str, Any]]] = []
    settings = made.move(high_water="0.00004")
    work = threading.Thread(
        target=lambda: ended.append(Run(parse(dict(setup.document, move=settings))).execute()), daemon=True
    )
    real, signal.signal = signal.signal, lambda *words: None  # type: ignore[assignment] - only the main thread may
    work.start()
    try:
        progress = setup.folder / "run/progress.json"
        until = time.monotonic() + 60
        seen: Dict[str, Any] = {}
        while not (seen.get("holding_since") and seen.get("failures", 0) >= 2):
            assert time.monotonic() < until and work.is_alive(), seen
            time.sleep(0.05)
            if progress.exists():
                seen = json.loads(progress.read_text()).get("moving") or {}
        signal.signal = real
        assert seen["error"] and seen["failing_since"] and seen["retry_at"] > seen["failing_since"]
        requests = -1
        while len(setup.engine.requests) != requests:  # what was given out before may still be on its way
            assert time.monotonic() < until
            requests = len(setup.engine.requests)
            time.sleep(1.0)
        here = sum(path.stat().st_size for path in (setup.output / "hidden_states").iterdir())
        assert here <= 40_000 and requests < len(ROWS)  # nothing was given out above the mark
        made.start()
        work.join(120)
        assert ended == [0]
        result = json.loads((setup.folder / "run/result.json").read_text())
        assert result["outcome"] == "complete" and result["counts"]["quarantined"] == 0
        book = Manifest(setup.output)
        mover = moving.Mover(setup.output, book, moving.Move.of(settings))
        mover.start(drain=True)
        assert mover.join(60)
        book.close()
        check(setup, made.place)
    finally:
        signal.signal = real
        made.kill()
        work.join(60)


def test_the_window_closes_while_the_remote_holds_the_run_back(setup: Setup, tmp_path: Path) -> None:
    settings = {"to": str(tmp_path / "far"), "rclone": "/bin/false", "high_water": "0.00004"}
    began = time.monotonic()
    code, result = setup.run(move=settings, stop_taking_work_at=time.time() + 4)
    assert (code, result["outcome"]) == (3, "window") and time.monotonic() - began < 30
    assert result["counts"]["quarantined"] == 0 and result["moving"]["failures"] > 0
    assert "are still here: playbooks/move.yml moves them beside production" in result["message"]


def test_a_sample_that_never_fits_is_told_and_not_waited_for(setup: Setup, tmp_path: Path) -> None:
    code, result = setup.run(move=move(tmp_path / "far", high_water="0.000005"))
    assert (code, result["outcome"]) == (1, "failed")
    assert "does not fit below hs_move_high_water" in result["message"]


def test_a_remote_that_is_another_outputs_ends_the_run_instead_of_holding_it(setup: Setup, tmp_path: Path) -> None:
    place = tmp_path / "nfs"
    place.mkdir()
    (place / "hs-owner.json").write_text('{"owner": "another", "output": "host:/out"}')
    code, result = setup.run(move=move(place, high_water="0.00004"))
    assert (code, result["outcome"]) == (1, "failed")
    assert "another output folder, host:/out" in result["message"]
    assert os.listdir(str(place)) == ["hs-owner.json"]


def test_verify_does_not_take_an_unmounted_remote_for_lost_samples(setup: Setup, tmp_path: Path) -> None:
    from sglang_hs.errors import HsError
    from sglang_hs_client.verify import verify

    place = tmp_path / "nfs"
    assert setup.run(move=move(place))[0] == 0
    rest_moved(setup, place)
    place.rename(tmp_path / "away")
    with pytest.raises(HsError, match="although {} samples were moved there".format(len(ROWS))):
        verify(setup.output, False, True, True)
    book = Manifest(setup.output, read_only=True)
    assert book.counts()["pending"] == 0
    book.close()


def test_the_reader_of_archives_takes_what_moved_before_there_were_any(setup: Setup, tmp_path: Path) -> None:
    place = tmp_path / "nfs"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "files/readers"))
    try:
        import sglang_hs_archives
    finally:
        sys.path.pop(0)
    from sglang_hs import archive

    assert setup.run()[0] == 0
    book = Manifest(setup.output)
    files = {sample.idx: setup.output / str(sample.file) for sample in book.samples()}
    members = [archive.Member(sample.idx, files[sample.idx], str(sample.sha256)) for sample in book.samples()][:5]
    book.close()
    (place / "archives").mkdir(parents=True)
    (place / "hidden_states").mkdir()
    size, total = archive.write(place / "archives/one.safetensors", members)
    row = moving.Archive(0, "archives/one.safetensors", tuple(one.idx for one in members), size, total)
    for idx, path in files.items():
        if idx not in row.members:
            (place / "hidden_states" / path.name).write_bytes(path.read_bytes())
    single = [idx for idx in files if idx not in row.members]
    (place / "archives.json").write_text(json.dumps(archive.index([row], single)))
    found = sglang_hs_archives.Archives(place)
    assert list(found) == sorted(files)
    for idx, ids in enumerate(ROWS):
        assert found[idx]["token_ids"].tolist() == ids


def test_an_equal_sample_whose_twin_has_moved_is_extracted_again(setup: Setup, tmp_path: Path) -> None:
    place = tmp_path / "nfs"
    setup.write_rows([{"input_ids": ids} for ids in ROWS[:3]])
    setup.run()
    book = Manifest(setup.output)
    identity = book.identity()
    book.close()
    rest_moved(setup, place)
    setup.write_rows([{"input_ids": ids} for ids in ROWS])
    book = Manifest(setup.output)
    from sglang_hs import dataset

    book.set("identity", dict(identity, dataset_sha256=dataset.digest(str(setup.dataset))))
    book.set("entered", False)
    book.close()
    code, result = setup.run(move=move(place))
    assert code == 0, result
    # rows 11 and 17 are equal to row 2, which is not here any more: one forward for the two of them
    assert result["counts"]["shared"] == 1
    rest_moved(setup, place)
    check(setup, place)


def test_nobody_takes_a_file_away_that_an_equal_sample_is_about_to_get(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mover is through with the twin the moment before its bytes are shared."""
    place = tmp_path / "nfs"
    real = extract.Extraction._share
    moved_first: List[int] = []

    def share(self: extract.Extraction, source: int, idx: int) -> None:
        mover = self.mover
        assert mover is not None
        mover.hurry(True)
        if not moved_first:
            self.manifest.commit()
            sample = self.manifest.sample(source)
            assert sample is not None
            mover.offer(source, sample.bytes or 0)
            until = time.monotonic() + 30
            while self.manifest.moved_to(source) is None and time.monotonic() < until:
                time.sleep(0.01)
            moved_first.append(source)
        real(self, source, idx)

    monkeypatch.setattr(extract.Extraction, "_share", share)
    code, result = setup.run(move=move(place))
    assert code == 0 and moved_first, result
    assert result["counts"]["shared"] == 2
    rest_moved(setup, place)
    check(setup, place)


def test_a_damaged_file_is_extracted_again_by_the_next_run(setup: Setup, tmp_path: Path) -> None:
    place = tmp_path / "nfs"
    assert setup.run()[0] == 0
    path = setup.output / "hidden_states/hs_5.safetensors"
    stamp = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(str(path), ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    rest_moved(setup, place)
    book = Manifest(setup.output, read_only=True)
    assert book.counts()["pending"] == 1
    book.close()
    assert setup.run(move=move(place))[0] == 0
    rest_moved(setup, place)
    check(setup, place)


def test_archives_hold_what_the_files_held(setup: Setup, tmp_path: Path) -> None:
    place = tmp_path / "nfs"
    more = {"archive": "safetensors", "archive_bytes": 20000}
    code, result = setup.run(move=move(place, **more))
    assert code == 0, result
    rest_moved(setup, place, **more)
    book = Manifest(setup.output, read_only=True)
    found = [idx for one in book.archives("moved") for idx in one.members]
    assert sorted(found) == list(range(len(ROWS))) and book.moved_counts()["archives"] > 1
    for sample in book.samples():
        where = book.moved_to(sample.idx)
        assert where is not None and where.archive
        data = moving.archive.unpack(place / where.file, sample.idx)
        assert hashlib.sha256(data).hexdigest() == sample.sha256
    book.close()
    assert os.listdir(str(setup.output / "hidden_states")) == []


KILLED = """
import os, sys, json
from pathlib import Path
from sglang_hs import moving
from sglang_hs.manifest import Manifest
from sglang_hs_client.run import Run
from sglang_hs_client.spec import parse
moving.LINGER = 0.05
real, seen = Manifest.moved, []
def moved(self, *words):
    real(self, *words)
    seen.append(1)
    if len(seen) == 2: os.kill(os.getpid(), 9)
Manifest.moved = moved
Run(parse(json.loads(Path(sys.argv[1]).read_text()))).execute()
"""


def test_a_client_that_is_killed_between_copy_and_unlink_loses_nothing(setup: Setup, tmp_path: Path) -> None:
    place = tmp_path / "nfs"
    settings = move(place, high_water="0.00004")
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(dict(setup.document, move=settings)))
    path = ":".join(str(Path(module.__file__ or "").resolve().parents[1]) for module in (moving, extract))
    env = {**os.environ, "PYTHONPATH": path}
    code = subprocess.run([sys.executable, "-c", KILLED, str(spec)], env=env, timeout=120).returncode
    assert code == -signal.SIGKILL
    assert setup.run(move=settings)[0] == 0
    rest_moved(setup, place)
    check(setup, place)


def test_verify_and_export_know_where_a_sample_is(
    setup: Setup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang_hs.errors import HsError
    from sglang_hs_client.export import export
    from sglang_hs_client.verify import verify

    place = tmp_path / "nfs"
    more = {"archive": "safetensors", "archive_bytes": 20000}
    code, result = setup.run(move=move(place, **more))
    assert code == 0, result
    rest_moved(setup, place, **more)
    assert verify(setup.output, True, False) == 0
    assert "--remote asks there" in capsys.readouterr().out
    assert verify(setup.output, False, False, True) == 0
    assert "whose bytes were looked at there" in capsys.readouterr().out
    with pytest.raises(HsError, match="was moved to {}".format(place)):
        export(setup.output, "speculators-pt", tmp_path / "refused", None)
    for name in ("manifest.json", "manifest.sqlite", "samples.jsonl"):
        (place / name).write_bytes((setup.output / name).read_bytes())
    result = export(place, "speculators-pt", tmp_path / "archived", None)
    assert result["written"] == len(ROWS)
    # a changed byte in an archive is every sample's of it
    one = sorted((place / "archives").iterdir())[0]
    one.write_bytes(one.read_bytes()[:-1] + b"\x55")
    book = Manifest(setup.output)
    members = book.archives("moved")[0].members
    book.close()
    capsys.readouterr()
    assert verify(setup.output, False, True, True) == 6
    told = capsys.readouterr().out
    assert "have changed (sha256)" in told and "{} wrong".format(len(members)) in told
    one.unlink()
    book = Manifest(setup.output, read_only=True)
    assert book.counts()["pending"] == len(members)
    book.close()
    assert setup.run(move=move(place, **more))[0] == 0  # extracted again
    rest_moved(setup, place, **more)
    assert verify(setup.output, True, False, True) == 0
