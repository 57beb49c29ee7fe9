"""Faults around a real, healthy server: each is told, the server lives, nothing wrong is accepted, and a resume completes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from proxy import Proxy, lying
from rig import MODEL, Rig, install, make_rig, private_engine
from sglang_hs import procs, server
from sglang_hs.manifest import Manifest

COUNT = 24
NO_CANARY = {"canary": {"sequences": 1, "positions": 1, "skip": True}}


def mounted(place: Path, size: str) -> None:
    """A small file system in memory at ``place``; skips where this machine lets us have none."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.decode().strip()}")


def grown(place: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True)


def unmounted(place: Path) -> None:
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A healthy server whose dump folder is a file system of its own, where root may mount one; and a reference pass."""
    folder = tmp_path_factory.mktemp("faults")
    rig = make_rig(folder / "rig", private_engine(folder), install(folder / "lib"), (COUNT, 16, 128))
    rig.dumps.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(rig.dumps)], check=False)
    try:
        with rig.serving():
            ended = rig.run()
            assert ended.code == 0, ended
            rig.equals_hugging_face()
            rig.keep_reference()
            yield rig
    finally:
        unmounted(rig.dumps)
        shutil.rmtree(rig.dumps, ignore_errors=True)


@pytest.fixture
def rig(served: Rig) -> Iterator[Rig]:
    """An empty output folder; the server must be alive and well after each test."""
    served.forget()
    before = served.scheduler()
    yield served
    served.output = served.folder / "out"
    assert served.scheduler() == before._replace(state=served.scheduler().state)
    assert server.healthy(served.url) is None


# -- no room -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["64k", "400k", "1500k"])
def test_the_output_disk_is_full(rig: Rig, size: str) -> None:
    """Full with the book, with the first samples, in the middle."""
    place = rig.folder / "small"
    mounted(place, size)
    try:
        rig.output = place / "out"
        ended = rig.run(output_dir=str(rig.output))
        assert (ended.code, ended.result.get("outcome")) == (1, "failed"), ended
        assert "is full" in ended.message and str(place) in ended.message, ended.message
        print(ended.message)
        names = rig.files()
        assert len(names) < COUNT and not any(name.startswith(".") for name in names)
        for name in names:
            rig.check_accepted(name)
        grown(place, "64m")
        ended = rig.run(output_dir=str(rig.output))
        assert ended.code == 0, ended
        rig.check_complete()
    finally:
        unmounted(place)


@pytest.mark.parametrize("room", [0, 60_000])
@pytest.mark.parametrize("canary", [True, False])
def test_the_dump_folder_is_full(rig: Rig, room: int, canary: bool) -> None:
    """To the last byte, or with room for small samples only; in the canary, or while samples are extracted."""
    if not os.path.ismount(rig.dumps):
        pytest.skip("the dump folder is no file system of its own: not root")
    filler = rig.dumps / "filler"
    info = os.statvfs(rig.dumps)
    try:
        with filler.open("wb") as handle:
            os.posix_fallocate(handle.fileno(), 0, info.f_bavail * info.f_frsize // 4096 * 4096 - room // 4096 * 4096)
        ended = rig.run(dump_wait_s=3, retries=1, outage_s=5, **({} if canary else NO_CANARY))
        assert ended.code != 0, ended
        assert "no space left in" in ended.message and str(rig.dumps) in ended.message, ended.message
        for name in rig.files():
            rig.check_accepted(name)
    finally:
        filler.unlink()
    ended = rig.run()
    assert ended.code == 0, ended
    rig.check_complete()


# -- changed bytes -----------------------------------------------------------------------------------------------------


class Tamperer(threading.Thread):
    """Spoils each dump once, in the moment between the capture's rename and the client's look."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.over = threading.Event()
        self.hit: dict[str, str] = {}  # name of a sequence -> what was done to its dump
        self._draw = random.Random(5)

    def run(self) -> None:
        while not self.over.is_set():
            for entry in os.scandir(self.folder):
                if (
                    entry.name.endswith(".safetensors")
                    and not entry.name.startswith(".")
                    and entry.name[:64] not in self.hit
                ):
                    self._spoil(Path(entry.path))

    def _spoil(self, path: Path) -> None:
        kind = self._draw.choice(["cut", "state", "ids", "header"])
        fd = os.open(path, os.O_RDWR)
        try:
            size = os.fstat(fd).st_size
            start = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
            if kind == "cut":
                os.ftruncate(fd, size - self._draw.randrange(1, size))
            else:
                # the tokens come first; the lowest bit of a state's mantissa is the least that can change
                length = size // (8 + 4 * 4 * 128)
                place = {
                    "header": self._draw.randrange(start),
                    "ids": start + 8 * self._draw.randrange(length),
                    "state": size - 4 * 77,
                }[kind]
                os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 1]), place)
        finally:
            os.close(fd)
        self.hit[path.name[:64]] = kind


def test_dumps_changed_on_their_way(rig: Rig) -> None:
    tamperer = Tamperer(rig.dumps / "done")
    tamperer.start()
    try:
        ended = rig.run(retries=3, **NO_CANARY)
    finally:
        tamperer.over.set()
        tamperer.join()
    assert ended.code == 0, ended
    book = Manifest(rig.output, read_only=True)
    again = {tamperer.hit[str(sample.name)] for sample in book.samples() if sample.attempts > 1}
    book.close()
    assert again == {"cut", "state", "ids", "header"}, tamperer.hit  # (a blow after the client's look hits nothing)
    rig.check_complete()


def flip(path: Path, place: int) -> None:
    """Change one bit."""
    with path.open("r+b") as handle:
        handle.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = handle.read(1)
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte[0] ^ 1]))


def test_accepted_files_changed_between_two_runs(rig: Rig) -> None:
    """Presence, size and header are looked at by every run; a bit inside the data by verify --checksums."""
    assert rig.run().code == 0
    folder = rig.output / "hidden_states"
    os.truncate(folder / "hs_3.safetensors", 1000)
    flip(folder / "hs_4.safetensors", 30)
    (folder / "hs_5.safetensors").unlink()
    shutil.copy(folder / "hs_7.safetensors", folder / "hs_6.safetensors")
    ended = rig.run(**NO_CANARY)
    assert ended.code == 0 and ended.result["counts"]["forwards"] == 4, ended
    rig.check_complete()

    flip(folder / "hs_8.safetensors", -1001)
    flip(folder / "hs_0.safetensors", -4)  # one inode with the last but one sample, its twin
    look = ("sglang_hs_client", "verify", "--output", str(rig.output))
    plain = rig.end(rig.python_m(*look))
    assert plain.code == 0 and f"{COUNT} of {COUNT} finished samples are right by size and header" in plain.out, plain
    found = rig.end(rig.python_m(*look, "--checksums"))
    assert found.code == 6, found
    wrong = [0, 8, COUNT - 2]
    for idx in wrong:
        assert f"sample {idx} (hidden_states/hs_{idx}.safetensors): its bytes have changed" in found.out, found.out
    assert f"{COUNT - 3} of {COUNT} finished samples are right by size, header and checksum, 3 wrong" in found.out
    marked = rig.end(rig.python_m(*look, "--checksums", "--redo"))
    assert marked.code == 6 and "3 wrong, to be extracted again by the next run; 3 pending" in marked.out, marked.out
    kept = {name for name in os.listdir(rig.output / "quarantine") if name.endswith(".safetensors")}
    assert kept == {f"hs_{idx}.safetensors" for idx in wrong}
    ended = rig.run(**NO_CANARY)
    assert ended.code == 0 and ended.result["counts"]["forwards"] == 2, ended  # the twins share one
    rig.check_complete()
    assert rig.end(rig.python_m(*look, "--checksums")).code == 0


def test_verify_names_strange_files_and_no_folder(rig: Rig) -> None:
    assert rig.run().code == 0
    for name in ("hs_99.safetensors", "notes.txt", ".hs_1.safetensors.part"):
        (rig.output / "hidden_states" / name).write_text("?")
    found = rig.end(rig.python_m("sglang_hs_client", "verify", "--output", str(rig.output)))
    assert found.code == 6 and "hidden_states/hs_99.safetensors: no finished sample's file" in found.out, found.out
    assert "3 strange files" in found.out
    found = rig.end(rig.python_m("sglang_hs_client", "verify", "--output", str(rig.folder)))
    assert found.code == 1 and "holds no extraction" in found.out


# -- a server that misbehaves ------------------------------------------------------------------------------------------


def test_a_server_that_answers_500_and_nonsense_and_half_answers(rig: Rig) -> None:
    def spoil(number: int, asked: dict[str, Any], status: int, answer: bytes) -> tuple[int, bytes, int]:
        if number < 6 or number % 3:
            return status, answer, len(answer)
        kind = number // 3 % 4
        if kind == 0:
            return 500, b'{"error": "no"}', 15
        if kind == 1:
            return 503, b"", 0
        if kind == 2:
            return 200, b"<html>", 6
        return 200, answer[: len(answer) // 2], len(answer)  # the connection ends in the middle

    with Proxy(rig.url, spoil) as proxy:
        ended = rig.run(server=proxy.url, retries=5, outage_s=30)
        assert ended.code == 0 and proxy.spoiled > 5, (ended, proxy.spoiled)
    rig.check_complete()


def test_a_server_that_takes_fewer_tokens(rig: Rig) -> None:
    """After the canary: no further attempt would give another answer; the run stops with the list, and nothing of it is lost."""
    with Proxy(rig.url, lying(prompt_tokens=lambda asked: min(len(asked["input_ids"]), 100))) as proxy:
        ended = rig.run(server=proxy.url, **NO_CANARY)
    assert (ended.code, ended.result["outcome"]) == (5, "error_budget"), ended
    assert "the server took 100 of" in ended.message and "it cut the prompt" in ended.message
    for name in rig.files():
        rig.check_accepted(name)
    assert rig.run().code == 0
    rig.check_complete()


def test_a_server_that_hangs_for_a_while(rig: Rig) -> None:
    """The scheduler is stopped in the middle, for longer than the client waits for an answer, and goes on."""
    client = rig.begin(request_timeout_s=1, retries=6, **NO_CANARY)
    rig.wait_accepted(client, 4)
    scheduler = rig.scheduler()
    procs.signal_process(scheduler, signal.SIGSTOP)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            client.wait(timeout=5)
        accepted = len(rig.files())
        assert accepted < COUNT
    finally:
        procs.signal_process(scheduler, signal.SIGCONT)
    ended = rig.end(client)
    assert ended.code == 0, ended
    book = Manifest(rig.output, read_only=True)
    assert max(sample.attempts for sample in book.samples()) > 1
    book.close()
    rig.check_complete()


# -- a folder that is somebody else's ----------------------------------------------------------------------------------


def test_two_clients_on_one_output(rig: Rig) -> None:
    """The first is held in the middle of its work; the second is refused at once, and the first completes."""
    first = rig.begin(**NO_CANARY)
    rig.wait_accepted(first, 2)
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        other = rig.folder / "other_run"
        ended = rig.run(run_dir=str(other))
        assert ended.code == 1 and "another client is at work on the output folder" in ended.message, ended
        found = rig.end(rig.python_m("sglang_hs_client", "verify", "--output", str(rig.output), "--redo"))
        assert found.code == 1 and "another client is at work on the output folder" in found.out
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    assert rig.end(first).code == 0
    rig.check_complete()


def test_another_output_but_the_same_dump_folder(rig: Rig) -> None:
    first = rig.begin(**NO_CANARY)
    rig.wait_accepted(first, 2)
    os.killpg(first.pid, signal.SIGSTOP)
    try:
        ended = rig.run(run_dir=str(rig.folder / "other_run"), output_dir=str(rig.folder / "other_out"))
        assert ended.code == 1 and "another client is at work on the dump folder" in ended.message, ended
    finally:
        os.killpg(first.pid, signal.SIGCONT)
    assert rig.end(first).code == 0
    rig.check_complete()


def test_a_data_set_that_changed_and_another_model_are_refused(rig: Rig) -> None:
    assert rig.run().code == 0
    before = rig.dataset.read_bytes()
    rows = [json.loads(line) for line in before.splitlines()]
    rows[3]["input_ids"][0] += 1
    try:
        rig.dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ended = rig.run()
        assert ended.code == 1 and "dataset_sha256: the folder has" in ended.message, ended
    finally:
        rig.dataset.write_bytes(before)
    other = rig.folder / "other_model"
    shutil.copytree(MODEL, other, dirs_exist_ok=True)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "comment": "fine-tuned"}))
    ended = rig.run(model_path=str(other))
    assert ended.code == 1 and "belongs to another extraction (model: the folder has" in ended.message, ended
    rig.check_complete()
