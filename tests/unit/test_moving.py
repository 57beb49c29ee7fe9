"""Moving by real rclone: to real servers of three protocols, that die, that lie, and a mover that is killed at any line."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import archive, movejob, movesettings, moving, rclone
from sglang_hs.errors import HsError
from sglang_hs.manifest import Manifest
from sglang_hs.movesettings import HighWater, Move
from sglang_hs.moving import Mover

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import far as remotes

COUNT = 12
OWNER = rclone.OWNER


def tensors(idx: int) -> bytes:
    """A sample's file: token ids and bfloat16 states, an odd number of them."""
    length = 3 + idx % 4
    ids = b"".join((idx * 100 + place).to_bytes(8, "little") for place in range(length))
    states = hashlib.sha512(str(idx).encode()).digest() * 40
    states = states[: length * 3 * 7 * 2]
    header = {
        "__metadata__": {"name": f"name{idx}", "crc32": "0"},
        "hidden_states": {"dtype": "BF16", "shape": [length, 3, 7], "data_offsets": [len(ids), len(ids) + len(states)]},
        "token_ids": {"dtype": "I64", "shape": [length], "data_offsets": [0, len(ids)]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + ids + states


def make(folder: Path, count: int = COUNT) -> Manifest:
    """An output folder with ``count`` finished samples."""
    (folder / "hidden_states").mkdir(parents=True)
    book = Manifest(folder, lag=0.05)
    book.add((idx, f"name{idx}", 3 + idx % 4, None) for idx in range(count))
    for idx in range(count):
        finish(folder, book, idx)
    book.commit()
    return book


def finish(folder: Path, book: Manifest, idx: int) -> None:
    data = tensors(idx)
    (folder / f"hidden_states/hs_{idx}.safetensors").write_bytes(data)
    book.done(idx, f"hidden_states/hs_{idx}.safetensors", len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "LINGER", 0.05)
    monkeypatch.setattr(moving, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(moving, "LONGEST_PAUSE", 0.4)


@pytest.fixture(params=remotes.KINDS)
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[remotes.Far]:
    made = remotes.Far(tmp_path / "remote", request.param)
    with made.serving():
        yield made


@pytest.fixture
def sftp(tmp_path: Path) -> Iterator[remotes.Far]:
    made = remotes.Far(tmp_path / "remote", "sftp")
    with made.serving():
        yield made


def to_folder(place: Path, **more: Any) -> Move:
    """Another disk, or NFS: a path."""
    return Move(to=str(place), rclone=str(remotes.program()), **more)


def drained(output: Path, book: Manifest, move: Move, patience: float = 60, **more: Any) -> Mover:
    mover = Mover(output, book, move, **more)
    mover.start(drain=True)
    assert mover.join(patience), mover.status()
    return mover


def wait(seen: Callable[[], bool], mover: Mover, patience: float = 30) -> None:
    until = time.monotonic() + patience
    while not seen():
        assert time.monotonic() < until, mover.status()
        time.sleep(0.01)


def check_far(place: Path, count: int = COUNT) -> None:
    """Every sample is there once, to the byte, and nothing else."""
    names = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and path.name != OWNER)
    assert names == sorted(f"hidden_states/hs_{idx}.safetensors" for idx in range(count))
    for idx in range(count):
        assert (place / f"hidden_states/hs_{idx}.safetensors").read_bytes() == tensors(idx)


def here(output: Path) -> list[str]:
    return sorted(os.listdir(output / "hidden_states"))


def test_samples_go_are_verified_and_leave(tmp_path: Path, far: remotes.Far) -> None:
    output = tmp_path / "out"
    book = make(output)
    mover = drained(output, book, Move.of(far.move()), files=5)
    check_far(far.place)
    assert here(output) == []
    told = mover.status()
    assert (told["moved"], told["waiting"], told["wrong"], told["failures"]) == (COUNT, 0, 0, 0)
    ways = {"sftp": "the remote's md5", "webdav": "reading it back (sha256)", "s3": "the remote's md5"}
    assert told["verified_by"] == ways[far.kind]
    assert book.moved_counts()["roots"] == {far.to: COUNT} and book.counts()["done"] == COUNT
    book.close()


def test_another_disk_is_a_remote_too(tmp_path: Path) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs/deep"
    book = make(output)
    mover = drained(output, book, to_folder(place))
    check_far(place)
    assert mover.status()["verified_by"] == "the remote's sha256" and here(output) == []
    book.close()


def test_a_sample_that_is_finished_later_goes_too_and_one_in_use_stays_until_it_is_not(tmp_path: Path) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 2)
    used = {1}

    def release(sample: Any, path: Path) -> bool:
        return False if sample.idx in used else moving.remove(path)

    mover = Mover(output, book, to_folder(place), release)
    mover.start()
    wait(lambda: mover.status()["moved"] == 2, mover)
    assert here(output) == ["hs_1.safetensors"] and not mover.idle()
    book.add([(2, "name2", 5, None)])
    finish(output, book, 2)
    mover.offer(2, 100)
    wait(lambda: mover.status()["moved"] == 3, mover)
    used.clear()
    wait(mover.idle, mover)
    mover.stop()
    assert here(output) == []
    check_far(place, 3)
    book.close()


def test_a_remote_that_dies_in_the_middle_costs_time_and_nothing_else(tmp_path: Path, sftp: remotes.Far) -> None:
    output = tmp_path / "out"
    book = make(output)
    mover = Mover(output, book, Move.of(sftp.move()), files=2)
    mover.start(drain=True)
    wait(lambda: mover.status()["moved"] >= 2, mover)
    sftp.kill()
    wait(lambda: mover.status()["failures"] >= 3, mover)
    told = mover.status()
    assert told["failing_since"] and told["retry_at"] > told["failing_since"] and "rclone" in told["error"]
    left = {f"hs_{sample.idx}.safetensors" for sample in book.waiting()}
    assert left and left == set(here(output))  # what is not entered is here
    sftp.start()
    assert mover.join(60), mover.status()
    assert mover.status()["failing_since"] is None
    check_far(sftp.place)
    assert here(output) == []
    book.close()


@pytest.mark.parametrize("kind", remotes.KINDS)
def test_other_bytes_at_the_far_end_are_noticed_and_the_sample_stays(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = remotes.Far(tmp_path / "remote", kind)
    output = tmp_path / "out"
    book = make(output, 4)
    path = made.place / "hidden_states/hs_2.safetensors"
    real = rclone.Rclone.copy
    spoilt: list[bytes] = []

    def copy(
        self: rclone.Rclone, source: str, root: str, files: Any, again: bool = False, patience: float = 600
    ) -> None:
        """A disk at the far end that changes a bit of what it was given, twice."""
        real(self, source, root, files, again, patience)
        if "hidden_states/hs_2.safetensors" in files and len(spoilt) < 2:
            seen = path.stat()
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))  # by size and time it looks right
            spoilt.append((output / "hidden_states/hs_2.safetensors").read_bytes())

    monkeypatch.setattr(rclone.Rclone, "copy", copy)
    with made.serving():
        mover = drained(output, book, Move.of(made.move()))
    assert spoilt == [tensors(2)] * 2 and mover.status()["wrong"] == 2
    check_far(made.place, 4)
    assert here(output) == []
    book.close()


def test_a_file_that_changed_here_is_not_moved_and_is_extracted_again(tmp_path: Path, sftp: remotes.Far) -> None:
    output = tmp_path / "out"
    book = make(output, 3)
    path = output / "hidden_states/hs_1.safetensors"
    path.write_bytes(tensors(1)[:-1] + b"\xff")
    (output / "hidden_states/hs_2.safetensors").unlink()
    told = []
    mover = drained(
        output, book, Move.of(sftp.move()), spoiled=lambda sample, reason: told.append((sample.idx, reason))
    )
    assert [idx for idx, _ in sorted(told)] == [1, 2] and "sha256" in dict(told)[1] and "gone" in dict(told)[2]
    assert book.counts()["pending"] == 2 and book.moved_counts()["moved"] == 1 and mover.status()["waiting"] == 0
    assert sorted(os.listdir(output / "quarantine")) == ["hs_1.json", "hs_1.safetensors", "hs_2.json"]
    finish(output, book, 1)
    finish(output, book, 2)
    book.commit()
    drained(output, book, Move.of(sftp.move()))
    check_far(sftp.place, 3)
    book.close()


def test_a_sample_that_is_offered_while_the_book_is_read_goes_once(tmp_path: Path) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    mover = Mover(output, book, to_folder(place))
    mover._begin()  # finds the sample in the book ...
    mover.offer(1, len(tensors(1)))  # ... and whoever made it offers it only then
    assert mover.status()["waiting"] == 3 and mover.status()["bytes_waiting"] == book.counts()["bytes_done"]
    mover.start(drain=True)
    assert mover.join(60)
    assert (mover.status()["moved"], mover.status()["waiting"]) == (3, 0) and mover.idle()
    check_far(place, 3)
    book.close()


def test_a_file_that_is_gone_here_after_it_was_copied_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By md5 of the remote: ours is computed of a file that somebody has removed."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    real = rclone.Rclone.copy

    def copy(self: rclone.Rclone, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        (output / "hidden_states/hs_1.safetensors").unlink(missing_ok=True)

    monkeypatch.setattr(rclone.Rclone, "copy", copy)
    monkeypatch.setattr(moving, "HASHES", ("md5",))
    mover = drained(output, book, to_folder(place))
    assert mover.status()["verified_by"] == "the remote's md5" and mover.status()["waiting"] == 0
    assert book.moved_counts()["moved"] == 2 and book.counts()["pending"] == 1
    assert "gone" in json.loads((output / "quarantine/hs_1.json").read_text())["reason"]
    book.close()


def test_a_file_that_the_disk_has_lost_is_extracted_again_and_the_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector: rclone cannot read it, this time and every other."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 4)
    real, opened = rclone.Rclone.copy, Path.open

    def copy(self: rclone.Rclone, source: str, root: str, files: Any, **more: Any) -> None:
        real(self, source, root, [file for file in files if "hs_2" not in file], **more)
        if "hidden_states/hs_2.safetensors" in files:
            raise rclone.Failed("read hs_2.safetensors: input/output error")

    def lost(self: Path, *words: Any, **more: Any) -> Any:
        if self == output / "hidden_states/hs_2.safetensors":
            raise OSError(5, "Input/output error")
        return opened(self, *words, **more)

    monkeypatch.setattr(rclone.Rclone, "copy", copy)
    monkeypatch.setattr(Path, "open", lost)
    mover = drained(output, book, to_folder(place))
    assert mover.status()["waiting"] == 0 and book.moved_counts()["moved"] == 3 and book.counts()["pending"] == 1
    assert "not readable" in json.loads((output / "quarantine/hs_2.json").read_text())["reason"]
    book.close()


def test_a_file_that_cannot_be_removed_here_is_entered_once_and_removed_later(tmp_path: Path) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    asked: list[int] = []

    def release(sample: Any, path: Path) -> bool:
        asked.append(sample.idx)
        if asked.count(1) < 3 and sample.idx == 1:
            raise OSError(30, "Read-only file system")
        return moving.remove(path)

    mover = Mover(output, book, to_folder(place), release)
    mover.start()
    wait(mover.idle, mover)
    mover.stop()
    assert asked.count(1) == 3 and asked.count(0) == asked.count(2) == 1 and here(output) == []
    assert mover.status()["moved"] == 3
    book.close()


def test_on_another_disk_a_copy_is_durable_before_the_book_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    synced: set[str] = set()
    fsync, moved = os.fsync, Manifest.moved

    def sync(fd: int) -> None:
        fsync(fd)
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))

    def entered(self: Manifest, root: str, samples: Any, *more: Any) -> None:
        for idx in samples:
            assert f"{place}/hidden_states/hs_{idx}.safetensors" in synced
        assert f"{place}/hidden_states" in synced
        moved(self, root, samples, *more)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Manifest, "moved", entered)
    drained(output, book, to_folder(place))
    check_far(place, 3)
    book.close()


def test_what_another_disk_did_not_take_is_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel tells it once: the next fsync succeeds, and what is read comes out of memory."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 2)
    fsync, copy = os.fsync, rclone.Rclone.copy
    refused: list[str] = []
    sent: list[bool] = []

    def sync(fd: int) -> None:
        fsync(fd)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if name.startswith(f"{place}/hidden_states/") and not refused:
            refused.append(name)
            raise OSError(5, "Input/output error")

    def counted(self: rclone.Rclone, source: str, root: str, files: Any, again: bool = False, **more: Any) -> None:
        sent.append(again)
        copy(self, source, root, files, again=again, **more)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(rclone.Rclone, "copy", counted)
    drained(output, book, to_folder(place))
    assert refused and sent == [False, True]
    check_far(place, 2)
    book.close()


def test_a_mount_point_without_its_disk_gets_nothing(tmp_path: Path) -> None:
    output, place, away = tmp_path / "out", tmp_path / "nfs", tmp_path / "unmounted"
    book = make(output, 3)
    drained(output, book, to_folder(place))
    place.rename(away)
    finish(output, book, 1)
    book.again(1)
    finish(output, book, 1)
    book.commit()
    settings: dict[str, Any] = {
        "move_to": str(place), "rclone": str(remotes.program()), "rclone_config": "", "rclone_options": [],
    }  # fmt: skip
    with pytest.raises(HsError, match="although 2 samples were moved there"):
        rclone.look(settings, "everything", False, book.mark(), 2)
    mover = Mover(output, book, to_folder(place))
    mover.start(drain=True)
    wait(lambda: mover.status()["failures"] >= 2, mover)
    assert "has no hs-owner.json" in mover.status()["error"] and not place.exists()
    away.rename(place)
    assert mover.join(60), mover.status()
    check_far(place, 3)
    book.close()


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("way", ["path", "link", "alias"])
def test_an_output_folder_is_never_its_own_remote(tmp_path: Path, way: str, marked: bool) -> None:
    """rclone has nothing to do, every checksum is right, and then the samples would be removed."""
    output = tmp_path / "out"
    book = make(output, 3)
    if marked:
        (output / OWNER).write_text(json.dumps({"owner": book.mark()}))
    (tmp_path / "link").symlink_to(output)
    config = tmp_path / "rclone.conf"
    config.write_text(f"[far]\ntype = alias\nremote = {output}\n")
    config.chmod(0o600)
    to = {"path": str(output), "link": str(tmp_path / "link"), "alias": "far:"}[way]
    mover = Mover(output, book, Move(to=to, rclone=str(remotes.program()), config=str(config)))
    mover.start()
    wait(lambda: mover.refused is not None, mover)
    mover.stop()
    assert ("is this output folder itself" if marked else "holds hidden_states/") in str(mover.refused)
    assert book.moved_counts()["moved"] == 0
    assert [(output / f"hidden_states/hs_{idx}.safetensors").read_bytes() for idx in range(3)] == [
        tensors(idx) for idx in range(3)
    ]
    book.close()


def test_a_remote_in_the_output_folder_or_around_it_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (tmp_path / "link").symlink_to(output)
    for wrong in (output, output / "far", tmp_path, tmp_path / "link/deep"):
        with pytest.raises(HsError, match="lie in each other"):
            movesettings.apart(str(wrong), str(output), "everything")
    for right in (str(tmp_path / "output"), "far:" + str(output)):
        movesettings.apart(right, str(output), "everything")


@pytest.mark.parametrize("name", ["hidden_states/hs_1.safetensors", "archives/hidden_states-000000.safetensors"])
def test_samples_of_nobody_knows_whom_are_not_written_over(tmp_path: Path, name: str) -> None:
    """As another host's output folder on a share has them."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    (place / name).parent.mkdir(parents=True)
    (place / name).write_text("another's")
    settings: dict[str, Any] = {
        "move_to": str(place), "rclone": str(remotes.program()), "rclone_config": "", "rclone_options": [],
    }  # fmt: skip
    with pytest.raises(HsError, match="already, and no hs-owner.json"):
        rclone.look(settings, "everything", True)
    mover = Mover(output, book, to_folder(place))
    mover.start()
    wait(lambda: mover.refused is not None, mover)
    mover.stop()
    assert [path for path in place.rglob("*") if path.is_file()] == [place / name]
    assert (place / name).read_text() == "another's" and len(here(output)) == 3
    book.close()


def test_a_remote_that_is_another_one_in_the_middle_is_noticed_before_anything_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    real, stolen = rclone.Rclone.copy, json.dumps({"owner": "another", "output": "host:/out"})

    def copy(self: rclone.Rclone, *words: Any, **more: Any) -> None:
        real(self, *words, **more)
        (place / OWNER).write_text(stolen)

    monkeypatch.setattr(rclone.Rclone, "copy", copy)
    mover = Mover(output, book, to_folder(place))
    mover.start(drain=True)
    wait(lambda: "another output folder" in mover.status()["error"], mover)
    mover.stop()
    assert book.moved_counts()["moved"] == 0 and len(here(output)) == 3
    book.close()


def test_what_the_remote_has_no_checksum_of_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object in several pieces, a checksum that failed in that moment."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    real = rclone.Rclone.hashes

    def hashes(self: rclone.Rclone, root: str, files: Any, kind: str, download: bool, patience: float = 600.0) -> Any:
        found = real(self, root, files, kind, download, patience)
        return {file: value for file, value in found.items() if download or "hs_1" not in file}

    monkeypatch.setattr(rclone.Rclone, "hashes", hashes)
    mover = drained(output, book, to_folder(place))
    assert mover.status()["verified_by"] == "the remote's sha256 and reading it back (sha256)"
    assert (mover.status()["wrong"], mover.status()["failures"]) == (0, 0)
    check_far(place, 3)
    book.close()


def test_checksums_of_a_remote_that_are_none_of_the_bytes_are_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a bucket of S3 that encrypts of its own accord calls MD5."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 3)
    real = rclone.Rclone.hashes

    def hashes(self: rclone.Rclone, root: str, files: Any, kind: str, download: bool, patience: float = 600.0) -> Any:
        found = real(self, root, files, kind, download, patience)
        return found if download else {file: value[::-1] for file, value in found.items()}

    monkeypatch.setattr(rclone.Rclone, "hashes", hashes)
    monkeypatch.setattr(moving, "HASHES", ("md5",))
    mover = drained(output, book, to_folder(place))
    assert mover.status()["verified_by"] == "reading it back (sha256)"
    assert (mover.status()["wrong"], mover.status()["failures"]) == (0, 0)
    check_far(place, 3)
    book.close()


def test_a_batch_is_a_part_of_what_waits_so_that_one_is_copied_while_one_is_verified(tmp_path: Path) -> None:
    output = tmp_path / "out"
    book = make(output)
    mover = Mover(output, book, to_folder(tmp_path / "nfs"), size=1 << 40)
    mover._least = 2, 1
    mover._ready = True
    for idx in range(COUNT):
        mover.offer(idx, 1000)
    sizes = []
    while mover._queue:
        sizes.append(len(mover._gather()))
    assert sizes[:4] == [4, 3, 2, 1] and sum(sizes) == COUNT and mover._queued == 0
    book.close()


def test_a_link_that_is_slower_than_expected_gets_there(tmp_path: Path) -> None:
    book = make(tmp_path / "out", 1)
    mover = Mover(tmp_path / "out", book, to_folder(tmp_path / "nfs"))
    parcel = moving.Parcel("a", 10**9, "", (), None)
    first = mover._patience([parcel])
    mover._failed("rclone copy was not through")
    assert mover._patience([parcel]) == 2 * first
    book.close()


# -- killed -----------------------------------------------------------------------------------------------------------------

KILLED = """
import os, sys
from pathlib import Path
from sglang_hs import moving, rclone
from sglang_hs.manifest import Manifest
moving.LINGER = 0.05
output, to, program, config, kind, at, nth = sys.argv[1:8]
seen = [0]
def fatal(owner, name, before):
    real = getattr(owner, name)
    def wrapped(*words, **more):
        seen[0] += 1
        if before and seen[0] == int(nth): os.kill(os.getpid(), 9)
        found = real(*words, **more)
        if not before and seen[0] == int(nth): os.kill(os.getpid(), 9)
        return found
    setattr(owner, name, wrapped)
{"copied": lambda: fatal(rclone.Rclone, "copy", False), "asked": lambda: fatal(rclone.Rclone, "hashes", False),
 "entering": lambda: fatal(Manifest, "moved", True), "entered": lambda: fatal(Manifest, "moved", False),
 "removing": lambda: fatal(moving, "remove", True), "planned": lambda: fatal(Manifest, "plan_archive", False)}[at]()
book = Manifest(Path(output))
mover = moving.Mover(Path(output), book, moving.Move(to, program, config, archive=kind, archive_bytes=1200), files=4)
mover.start(drain=True)
mover.join(60)
"""


@pytest.mark.parametrize(
    ("kind", "at", "nth"),
    [("none", "copied", 2), ("none", "asked", 2), ("none", "entering", 2), ("none", "entered", 1), ("none", "removing", 3),
     ("safetensors", "planned", 2), ("safetensors", "copied", 2), ("safetensors", "entering", 1), ("safetensors", "entered", 2),
     ("safetensors", "removing", 2)],
)  # fmt: skip
def test_killed_between_any_two_steps_nothing_is_lost_or_there_twice(
    tmp_path: Path, sftp: remotes.Far, kind: str, at: str, nth: int
) -> None:
    output = tmp_path / "out"
    make(output).close()
    root = str(Path(moving.__file__).resolve().parents[1])
    words = [sys.executable, "-c", KILLED, str(output), sftp.to, str(sftp.rclone), str(sftp.config), kind, at, str(nth)]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": root}, timeout=120, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    book = Manifest(output)
    assert book.counts()["done"] == COUNT
    for sample in book.waiting():  # what the book does not have at the remote is here, whole
        data = (output / str(sample.file)).read_bytes()
        assert hashlib.sha256(data).hexdigest() == sample.sha256
    drained(output, book, Move.of(sftp.move(archive=kind, archive_bytes=1200)))
    assert here(output) == [] and book.moved_counts()["moved"] == COUNT
    if kind == "none":
        check_far(sftp.place)
    else:
        check_archives(sftp.place, book)
    book.close()


# -- archives ---------------------------------------------------------------------------------------------------------------


def check_archives(place: Path, book: Manifest, count: int = COUNT) -> None:
    """Every sample is in one archive, to the byte of its own file; no other archive lies there."""
    known = book.archives("moved")
    assert sorted(found.file for found in known) == sorted(
        str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and path.name != OWNER
    )
    assert sorted(idx for found in known for idx in found.members) == list(range(count))
    for found in known:
        data = (place / found.file).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (found.bytes, found.sha256)
        for idx in found.members:
            assert archive.unpack(place / found.file, idx) == tensors(idx)
            assert book.moved_to(idx) == (book.moved_to(found.members[0]) or ("",))[:1] + (found.file, True)


def test_many_samples_go_in_one_file(tmp_path: Path, far: remotes.Far) -> None:
    output = tmp_path / "out"
    book = make(output)
    drained(output, book, Move.of(far.move(archive="safetensors", archive_bytes=2000)))
    check_archives(far.place, book)
    assert 1 < book.moved_counts()["archives"] < COUNT / 2
    assert here(output) == [] and os.listdir(output / "archives") == []
    book.close()


def test_an_archive_is_laid_out_as_the_formats_own_writers_do(tmp_path: Path) -> None:
    output = tmp_path / "out"
    book = make(output, 5)
    members = [archive.Member(one.idx, output / str(one.file), str(one.sha256)) for one in book.samples()]
    size, total = archive.write(tmp_path / "one", members)
    assert archive.write(tmp_path / "two", list(reversed(members))) == (size, total)
    document, base = archive.header(tmp_path / "one")
    document.pop("__metadata__")
    entries = sorted(document.values(), key=lambda entry: int(entry["data_offsets"][0]))
    assert base % 8 == 0 and entries[0]["data_offsets"][0] == 0 and base + entries[-1]["data_offsets"][1] == size
    for before, entry in zip(entries, entries[1:], strict=False):
        assert before["data_offsets"][1] == entry["data_offsets"][0]  # no holes
    assert all(entry["data_offsets"][0] % archive.SIZES[entry["dtype"]] == 0 for entry in entries)
    (output / "hidden_states/hs_3.safetensors").write_bytes(tensors(4))
    with pytest.raises(archive.Spoiled) as fault:
        archive.write(tmp_path / "three", members)
    assert fault.value.idx == 3
    book.close()


def test_a_member_that_changed_dissolves_its_archive(tmp_path: Path, sftp: remotes.Far) -> None:
    output = tmp_path / "out"
    book = make(output, 6)
    (output / "hidden_states/hs_3.safetensors").write_bytes(tensors(4))
    mover = drained(output, book, Move.of(sftp.move(archive="safetensors", archive_bytes=100000)))
    assert book.counts()["pending"] == 1 and book.moved_counts()["moved"] == 5
    assert [found.file for found in book.archives("dropped")] == ["archives/hidden_states-000000.safetensors"]
    mover.drop_archives()
    assert book.archives("dropped") == []
    finish(output, book, 3)
    book.commit()
    drained(output, book, Move.of(sftp.move(archive="safetensors", archive_bytes=100000)))
    check_archives(sftp.place, book, 6)
    book.close()


def test_what_cannot_be_planned_in_this_moment_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk under the book: the samples are asked for again, and no drain ends without them."""
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output)
    real, calls = Manifest.plan_archive, [0]

    def plan_archive(self: Manifest, *words: Any) -> Any:
        calls[0] += 1
        if calls[0] in (1, 3):
            raise OSError(28, "No space left on device")
        return real(self, *words)

    monkeypatch.setattr(Manifest, "plan_archive", plan_archive)
    mover = drained(output, book, to_folder(place, archive="safetensors", archive_bytes=2000))
    assert mover.status()["waiting"] == 0
    check_archives(place, book)
    book.close()


@pytest.mark.parametrize("spoil", [
    lambda data: data[:-1],
    lambda data: data.replace(b'"dtype": "BF16"', b'"dtypo": "BF16"'),
    lambda data: data.replace(b'"dtype": "BF16"', b'"dtype": "BF61"'),
    lambda data: data.replace(b'"data_offsets": [0, ', b'"data_offsets": [9, '),
    lambda data: b"\xff" + data[1:],
])  # fmt: skip
def test_a_member_with_a_damaged_header_is_told_and_not_tried_for_ever(
    tmp_path: Path, spoil: Callable[[bytes], bytes]
) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 4)
    path = output / "hidden_states/hs_2.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    drained(output, book, to_folder(place, archive="safetensors", archive_bytes=100000))
    assert book.counts()["pending"] == 1 and book.moved_counts()["moved"] == 3
    assert "header" in json.loads((output / "quarantine/hs_2.json").read_text())["reason"]
    book.close()


def test_where_there_is_no_room_for_an_archive_smaller_ones_are_made(
    tmp_path: Path, sftp: remotes.Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    book = make(output)
    real = archive.write

    def small(path: Path, members: Any, each: Any) -> Any:
        if len(list(members)) > 4:
            raise OSError(28, "No space left on device")
        return real(path, members, each)

    monkeypatch.setattr(archive, "write", small)
    drained(output, book, Move.of(sftp.move(archive="safetensors", archive_bytes=100000)))
    sftp_files = [found for found in book.archives("moved")]
    assert [len(found.members) for found in sftp_files] == [3, 3, 3, 3]
    check_archives(sftp.place, book)
    book.close()


# -- the mark, the settings, secrets -----------------------------------------------------------------------------------------


def test_the_high_water_mark() -> None:
    assert HighWater("80%").room(free=500, total=1000, waiting=400) == 300
    assert HighWater("80%").room(free=100, total=1000, waiting=400) == -100
    assert HighWater("500").room(free=10**12, total=2 * 10**12, waiting=200 * 10**9) == 300 * 10**9
    assert HighWater("500 GB").room(free=5, total=10**12, waiting=0) == 5
    for wrong in ("", "0%", "100%", "much", "0", "-5", "120%"):
        with pytest.raises(HsError, match="hs_move_high_water"):
            HighWater(wrong)


@pytest.mark.parametrize(
    ("move_to", "options"),
    [(":sftp,host=h,pass=x:p", []), (":s3,secret_access_key=abc:b", []), ("far:b", ["--sftp-pass", "x"]), ("far:b", ["--s3-secret-access-key=x"]),
     (":webdav,bearer_token=x:", []), ("far:b", ["--azureblob-key=x"])],
)  # fmt: skip
def test_a_secret_on_a_command_line_is_refused(move_to: str, options: list[str]) -> None:
    with pytest.raises(HsError, match="looks like a secret"):
        rclone.check(move_to, "", options, "everything")


@pytest.mark.parametrize("move_to", ["far:data/key", "secret:bucket", "/mnt/nfs/a=b", ":sftp,host=h,key_file=/k:p"])
def test_what_is_no_secret_is_not_taken_for_one(move_to: str) -> None:
    rclone.check(move_to, "", ["--transfers", "8", "--sftp-key-file", "/k", "--bwlimit=100M"], "everything")


@pytest.mark.parametrize("move_to", ["relative/path", "-x:y", "far:a\nb"])
def test_a_place_that_is_none_is_refused(move_to: str) -> None:
    with pytest.raises(HsError, match="neither a remote"):
        rclone.check(move_to, "", [], "everything")


def test_a_configuration_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rclone.conf"
    with pytest.raises(HsError, match="cannot be looked at"):
        rclone.check("far:", str(path), [], "everything")
    path.write_text("[far]\n")
    path.chmod(0o640)
    with pytest.raises(HsError, match="only its owner can read"):
        rclone.check("far:", str(path), [], "everything")
    path.chmod(0o600)
    rclone.check("far:", str(path), [], "everything")


def test_secrets_are_in_no_word_environment_or_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "rclone.conf"
    config.write_text(
        "[far]\ntype = s3\nsecret_access_key = verysecret\nendpoint = http://h\nkey_file = /path/to/key\n"
    )
    seen = tmp_path / "seen"
    program = tmp_path / "rclone"
    program.write_text(
        f'#!/bin/sh\n{{ printf "%s\\n" "$@"; env; }} > {seen}\necho "ERROR : denied for verysecret, {config}" >&2\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("RCLONE_CONFIG_FAR_PASS", "another")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "third")
    monkeypatch.setenv("https_proxy", "http://proxy")
    monkeypatch.setenv("HOME", "/home/production")
    tool = rclone.Rclone(str(program), str(config))
    with pytest.raises(rclone.Failed, match=r"denied for \(hidden\)"):
        tool.copy("/a", "far:b", ["x"])
    words = seen.read_text()
    assert "verysecret" not in words and "another" not in words and "third" not in words
    assert "https_proxy=http://proxy" in words and "\n--config\n" in words
    # the key files of production's user are not those of ours
    assert f"\nHOME={pwd.getpwuid(os.geteuid()).pw_dir}\n" in words


def test_the_remote_is_looked_at_before_anything_is_stopped(tmp_path: Path, far: remotes.Far) -> None:
    settings: dict[str, Any] = {
        "move_to": far.to, "rclone": str(far.rclone), "rclone_config": str(far.config), "rclone_options": [],
    }  # fmt: skip
    found = rclone.look(settings, "everything", True)
    assert found["version"] == "1.75"
    assert [path for path in far.root.rglob("*") if path.is_file()] == []  # the probe is gone
    with pytest.raises(HsError, match="not to be had"):
        rclone.look({**settings, "rclone": str(tmp_path / "none")}, "everything", True)
    with pytest.raises(HsError, match="is of no use"):
        rclone.look({**settings, "move_to": "nobody:a"}, "everything", False)
    far.kill()
    with pytest.raises(HsError, match="is of no use") as refused:
        rclone.look(settings, "everything", False)
    assert remotes.KEY not in str(refused.value)


def test_stop_ends_a_call_at_work_at_once(tmp_path: Path) -> None:
    output = tmp_path / "out"
    book = make(output, 3)
    program = tmp_path / "rclone"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    mover = Mover(output, book, Move(to=str(tmp_path / "far"), rclone=str(program)))
    mover.start()
    wait(lambda: mover._copier._process is not None, mover)
    child = mover._copier._process
    assert child is not None
    began = time.monotonic()
    mover.stop()
    assert time.monotonic() - began < 5 and child.poll() is not None
    assert len(here(output)) == 3 and book.moved_counts()["moved"] == 0
    book.close()


def test_a_remotes_folder_belongs_to_one_output(tmp_path: Path, sftp: remotes.Far) -> None:
    """Two outputs have files of the same names: the second must not write over the first."""
    first, second = tmp_path / "out", tmp_path / "other"
    book = make(first, 2)
    drained(first, book, Move.of(sftp.move()))
    other = make(second, 2)
    settings: dict[str, Any] = {
        "move_to": sftp.to, "rclone": str(sftp.rclone), "rclone_config": str(sftp.config), "rclone_options": [],
    }  # fmt: skip
    rclone.look(settings, "everything", True, book.mark())
    with pytest.raises(HsError, match="holds the samples of another output folder"):
        rclone.look(settings, "everything", True, other.mark())
    mover = Mover(second, other, Move.of(sftp.move()))
    mover.start()
    wait(lambda: mover.status()["failures"] >= 2, mover)
    mover.stop()
    assert "another output folder" in mover.status()["error"] and len(here(second)) == 2
    check_far(sftp.place, 2)
    book.close()
    other.close()


# -- hs move ----------------------------------------------------------------------------------------------------------------


def hs_move(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(moving.__file__).resolve().parents[1])
    command = [sys.executable, "-m", "sglang_hs", "move", "--state-dir", str(state), *words]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=120)


def described(output: Path) -> None:
    for name in ("manifest.json", "samples.jsonl", "state.json"):
        (output / name).write_text(name)


def test_what_is_left_goes_by_the_books_settings_and_its_description_too(tmp_path: Path, sftp: remotes.Far) -> None:
    output, state = tmp_path / "out", tmp_path / "state"
    state.mkdir()
    book = make(output, 5)
    book.set("move", sftp.move(archive="safetensors", archive_bytes=1200))
    book.close()
    described(output)
    done = hs_move(state, "--output", str(output))
    assert done.returncode == 0 and "5 samples of" in done.stdout, done.stdout + done.stderr
    told = json.loads((state / "move.json").read_text())
    assert told["finished"] and not told["failed"] and told["moved"] == 5
    for name in ("manifest.json", "samples.jsonl", "state.json", "manifest.sqlite", "archives.json"):
        assert (sftp.place / name).read_bytes() == (output / name).read_bytes()
    index = json.loads((sftp.place / "archives.json").read_text())
    assert sorted(idx for one in index["archives"] for idx in one["samples"]) == list(range(5))
    far_book = Manifest(sftp.place, read_only=True)
    assert far_book.moved_counts()["moved"] == 5
    far_book.close()


def test_the_index_names_each_sample_once_also_when_it_was_extracted_again(tmp_path: Path) -> None:
    output, place, state = tmp_path / "out", tmp_path / "nfs", tmp_path / "state"
    state.mkdir()
    book = make(output, 6)
    book.set("move", to_folder(place, archive="safetensors", archive_bytes=1200)._asdict())
    book.commit()
    described(output)
    assert hs_move(state, "--output", str(output)).returncode == 0
    first, second = book.archives("moved")[:2]
    for idx in (*first.members, second.members[0]):
        book.again(idx)
        finish(output, book, idx)
    book.commit()
    done = hs_move(state, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((place / "archives.json").read_text())
    assert sorted(idx for one in index["archives"] for idx in one["samples"]) == list(range(6))
    assert not (place / first.file).exists() and (place / second.file).exists()
    for one in index["archives"]:
        for idx in one["samples"]:
            assert archive.unpack(place / one["file"], idx) == tensors(idx)
    book.close()


def test_a_move_is_refused_while_a_run_is_open_and_ends_when_one_is_opened(tmp_path: Path) -> None:
    output, state = tmp_path / "out", tmp_path / "state"
    state.mkdir()
    make(output, 3).close()
    program = tmp_path / "rclone"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    (tmp_path / "set.json").write_text(json.dumps({"to": str(tmp_path / "far"), "rclone": str(program)}))
    words = ("--output", str(output), "--settings", str(tmp_path / "set.json"))
    (state / "journal.json").write_text("{}")
    refused = hs_move(state, *words)
    assert refused.returncode == 1 and "a run is open on this host" in refused.stdout
    (state / "journal.json").unlink()
    root = str(Path(moving.__file__).resolve().parents[1])
    command = [sys.executable, "-m", "sglang_hs", "move", "--state-dir", str(state), *words]
    (state / "move.json").unlink()
    work = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not (state / "move.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    (state / "journal.json").write_text("{}")
    out, _ = work.communicate(timeout=60)
    assert work.returncode == 0 and "its own client moves on" in out
    assert len(here(output)) == 3


def test_a_move_ends_for_a_run_also_while_it_describes(tmp_path: Path) -> None:
    """The run's client needs the folder's lock, and production is down by then."""
    output, state, seen = tmp_path / "out", tmp_path / "state", tmp_path / "seen"
    state.mkdir()
    make(output, 2).close()
    described(output)
    program = tmp_path / "rclone"
    program.write_text(
        f'#!/bin/sh\ncase " $* " in *" --download "*) touch {seen}; exec sleep 600;; esac\nexec {remotes.program()} "$@"\n'
    )
    program.chmod(0o755)
    (tmp_path / "set.json").write_text(json.dumps({"to": str(tmp_path / "far"), "rclone": str(program)}))
    root = str(Path(moving.__file__).resolve().parents[1])
    command = [sys.executable, "-m", "sglang_hs", "move", "--state-dir", str(state), "--output", str(output)]
    command += ["--settings", str(tmp_path / "set.json")]
    work = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": root}, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not seen.exists() and time.monotonic() < until:
        time.sleep(0.05)
    (state / "journal.json").write_text("{}")
    out, _ = work.communicate(timeout=30)
    assert work.returncode == 0 and "its own client moves on" in out


def test_a_file_that_stays_here_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, state = tmp_path / "out", tmp_path / "state"
    state.mkdir()
    book = make(output, 2)
    move = to_folder(tmp_path / "nfs")._asdict()
    book.close()
    real = moving.remove

    def remove(path: Path) -> bool:
        if path.name == "hs_1.safetensors":
            raise OSError(30, "Read-only file system")
        return real(path)

    monkeypatch.setattr(moving, "remove", remove)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    told = movejob.run(str(state), str(output), move)
    assert told["failed"] and "could not be removed" in told["line"] and "Read-only" in told["line"]


def test_a_description_is_tried_until_it_is_there_and_not_sent_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, place = tmp_path / "out", tmp_path / "nfs"
    book = make(output, 2)
    described(output)
    mover = drained(output, book, to_folder(place))
    real, calls, sent = rclone.Rclone.hashes, [0], []
    copy = rclone.Rclone.copy

    def hashes(self: rclone.Rclone, *words: Any) -> Any:
        calls[0] += 1
        if calls[0] <= 7:
            raise rclone.Failed("it is away")
        return real(self, *words)

    def counted(self: rclone.Rclone, source: str, root: str, files: Any, **more: Any) -> None:
        sent.append(list(files))
        copy(self, source, root, files, **more)

    monkeypatch.setattr(rclone.Rclone, "hashes", hashes)
    monkeypatch.setattr(rclone.Rclone, "copy", counted)
    for _ in range(2):
        describer = movejob._Describer(output, book, to_folder(place), mover)
        describer.run()
        assert describer.fault is None
    assert describer.failing == {} and calls[0] > 7
    assert sent == [["manifest.json", "samples.jsonl", "state.json", "manifest.sqlite"]]
    book.close()


def test_the_index_names_samples_that_moved_before_there_were_archives(tmp_path: Path) -> None:
    output, place, state = tmp_path / "out", tmp_path / "nfs", tmp_path / "state"
    state.mkdir()
    book = make(output, 3)
    drained(output, book, to_folder(place))
    book.add((idx, f"name{idx}", 5, None) for idx in (3, 4))
    for idx in (3, 4):
        finish(output, book, idx)
    book.set("move", to_folder(place, archive="safetensors", archive_bytes=100000)._asdict())
    book.commit()
    assert hs_move(state, "--output", str(output)).returncode == 0
    index = json.loads((place / "archives.json").read_text())
    assert index["single"] == [0, 1, 2] and [one["samples"] for one in index["archives"]] == [[3, 4]]
    book.close()


def test_what_is_at_two_remotes_is_told_of_each(tmp_path: Path) -> None:
    output, state = tmp_path / "out", tmp_path / "state"
    state.mkdir()
    book = make(output, 2)
    drained(output, book, to_folder(tmp_path / "first"))
    book.add([(2, "name2", 5, None)])
    finish(output, book, 2)
    book.set("move", to_folder(tmp_path / "second")._asdict())
    book.close()
    done = hs_move(state, "--output", str(output))
    assert (
        f"2 samples of {output} are at {tmp_path}/first, 1 samples of {output} are at {tmp_path}/second" in done.stdout
    )


def test_a_remote_with_a_slash_at_its_end_is_the_same() -> None:
    assert Move.of({"to": "far:a/"}) == Move.of({"to": "far:a"}) and Move.of({"to": "/"}).to == "/"


def test_a_move_without_a_place_or_an_extraction_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "out", 1).close()
    assert "move nowhere" in hs_move(tmp_path, "--output", str(tmp_path / "out")).stdout
    assert "holds no extraction" in hs_move(tmp_path, "--output", str(tmp_path)).stdout
    assert "no run is known" in hs_move(tmp_path).stdout


def test_rclone_dies_with_whoever_called_it_however_that_ends(tmp_path: Path) -> None:
    seen = tmp_path / "pid"
    program = tmp_path / "rclone"
    program.write_text(f"#!/bin/sh\necho $$ > {seen}.part\nmv {seen}.part {seen}\nexec sleep 600\n")
    program.chmod(0o755)
    script = f"from sglang_hs.rclone import Rclone; Rclone({str(program)!r}).call('version')"
    root = str(Path(moving.__file__).resolve().parents[1])
    caller = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": root})
    until = time.monotonic() + 30
    while not seen.exists() and time.monotonic() < until:
        time.sleep(0.02)
    child = int(seen.read_text())
    caller.kill()
    caller.wait()
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()
