"""A data set three times as large as the disk of its output: extracted whole through a real remote, and read back by the trainers' readers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_host import CACHE, REPO, Host
from rig import install, make_rig, private_engine
from sglang_hs.manifest import Manifest
from trainers import ARCHIVES, judged

sys.path.insert(0, str(REPO / "tests"))

import far as remotes

DATASET = CACHE / "engine/dataset.jsonl"
COUNT = 64


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of its own with so many bytes; once."""
    place = tmp_path / "disk"
    place.mkdir()

    def mount(size: int) -> Path:
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(words, capture_output=True).returncode != 0:
            pytest.skip("a small file system: only root may mount one")
        return place

    yield mount
    subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[remotes.Far]:
    """A server of SFTP; it serves when a test says so."""
    made = remotes.Far(tmp_path / "remote", "sftp")
    yield made
    made.kill()


def settings(far: remotes.Far, output: Path, **more: Any) -> dict[str, Any]:
    return {
        "hs_formats": ["native", "specforge"],
        "hs_output_dir": str(output),
        "hs_in_flight": 1,
        "hs_move_to": far.to,
        "hs_rclone": str(far.rclone),
        "hs_rclone_config": str(far.config),
        **more,
    }


def brought_back(far: remotes.Far, folder: Path) -> Path:
    """What lies at the remote, copied by rclone as anybody would."""
    subprocess.run(
        [far.rclone, "--config", far.config, "copy", far.to, folder], check=True, capture_output=True, timeout=120
    )
    return folder


def bytes_of(dataset: Path) -> int:
    """Of its samples' values: three boundaries and both final states of 128 float32, and the ids."""
    return sum(len(json.loads(line)["input_ids"]) * (5 * 128 * 4 + 8) for line in dataset.read_text().splitlines())


def equals_hugging_face(folder: Path, dataset: Path) -> None:
    words = [
        str(CACHE / "engine/venv/bin/python"),
        "tests/engine/hf_reference.py",
        "--model",
        str(CACHE / "engine/model"),
    ]
    words += ["--dataset", str(dataset), "--output", str(folder), "--tolerance", "1e-4"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_three_times_the_disk_goes_through_a_remote_that_was_away_for_a_while(
    tmp_path: Path, small_disk: Callable[[int], Path], far: remotes.Far
) -> None:
    rig = make_rig(
        tmp_path / "rig", private_engine(tmp_path), install(tmp_path / "lib"), (COUNT, 64, 256), final="both"
    )
    place = small_disk(bytes_of(rig.dataset) // 3)
    rig.output = place / "out"
    move = far.move(high_water="80%")
    with rig.serving():
        client = rig.begin(move=move, in_flight=2)  # nobody serves at the far end

        def moving() -> dict[str, Any]:
            return dict(json.loads((rig.folder / "run/progress.json").read_text()).get("moving") or {})

        rig.wait_begun(client)
        rig.wait_for(client, lambda: bool(moving().get("holding_since") and moving().get("failures")), 200)
        held = shutil.disk_usage(place)
        assert held.free >= 0.2 * held.total  # held back, not filled up
        far.start()
        ended = rig.end(client, patience=400)
    assert (ended.code, ended.result["outcome"]) == (0, "complete"), ended
    assert ended.result["moving"]["held_s"] > 0 and ended.result["counts"]["quarantined"] == 0
    assert f"samples are at {far.to}" in ended.message
    state = tmp_path / "state"
    state.mkdir()
    env = {**os.environ, "PYTHONPATH": str(rig.lib)}
    words = [sys.executable, "-m", "sglang_hs", "move", "--state-dir", str(state), "--output", str(rig.output)]
    moved = subprocess.run(
        words, env=env, capture_output=True, text=True, timeout=300
    )  # as the book says: the run's own settings
    assert moved.returncode == 0 and f"{COUNT} samples of" in moved.stdout, moved.stdout + moved.stderr
    assert os.listdir(rig.output / "hidden_states") == []
    words = [str(rig.python), "-m", "sglang_hs_client", "verify", "--output", str(rig.output), "--remote"]
    verified = subprocess.run(words, env=rig.client_env(), capture_output=True, text=True, timeout=120)
    assert verified.returncode == 0 and f"{COUNT} of them are at" in verified.stdout, verified.stdout + verified.stderr
    back = brought_back(far, tmp_path / "back")
    assert sum(path.stat().st_size for path in (back / "hidden_states").iterdir()) >= 3 * held.total
    equals_hugging_face(back, rig.dataset)
    told = judged("speculators-0.9", back, back, rig.dataset, tmp_path / "printed.py")
    assert f"{COUNT} samples of" in told
    words = [str(rig.python), "-m", "sglang_hs_client", "export", "--output", str(back), "--format", "specforge"]
    exported = subprocess.run(
        [*words, "--to", f"{back}-specforge"], env=rig.client_env(), capture_output=True, text=True
    )
    assert exported.returncode == 0, exported.stdout + exported.stderr
    told = judged("specforge", back, Path(f"{back}-specforge"), rig.dataset, tmp_path / "printed.py")
    assert f"{COUNT} samples of" in told
    # a byte that changes at the far end afterwards is found, and the sample is extracted again
    path = far.place / "hidden_states/hs_7.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    words = [str(rig.python), "-m", "sglang_hs_client", "verify", "--output", str(rig.output), "--remote", "--redo"]
    found = subprocess.run(words, env=rig.client_env(), capture_output=True, text=True, timeout=120)
    assert found.returncode == 6 and "sample 7" in found.stdout and "1 wrong" in found.stdout, (
        found.stdout + found.stderr
    )
    book = Manifest(rig.output, read_only=True)
    assert book.counts()["pending"] == 1 and book.moved_counts()["moved"] == COUNT - 1
    book.close()


@pytest.mark.long
def test_the_playbooks_take_a_data_set_through_a_remote(
    host: Host, tmp_path: Path, small_disk: Callable[[int], Path], far: remotes.Far
) -> None:
    """extract.yml, plan, status and move.yml with the real production beside."""
    before = host.signature()
    small = small_disk(bytes_of(DATASET) // 3)
    output = small / "samples"
    extra = settings(far, output)
    refused = host.play("extract", extra=extra)  # the remote is not there
    assert refused.code == 2 and "is of no use" in " ".join(refused.out.split()), refused.out
    assert host.signature() == before
    with far.serving():
        planned = host.play("plan", extra=extra)
        assert planned.code == 0, planned.out
        assert f"all of it to {far.to}" in " ".join(planned.out.split()), planned.out
    log = (host.folder / "play.log").open("w")
    far.start()
    command = [*host.command("extract"), "-e", json.dumps(extra)]
    play = subprocess.Popen(command, cwd=REPO, env=host.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        host.wait_for("the client at work", lambda: host.step_begun("extract"))
        far.kill()

        def progress() -> dict[str, Any]:
            found = sorted((host.state / "runs").glob("*/progress.json"), key=os.path.getmtime)
            return dict(json.loads(found[-1].read_text()).get("moving") or {}) if found else {}

        host.wait_for("the extraction held back", lambda: progress().get("holding_since"))
        used = shutil.disk_usage(small)
        assert used.free > 0.1 * used.total  # held back, not filled up
        told = host.play("status")
        assert "WAITING FOR THE REMOTE" in " ".join(told.out.split()), told.out
        far.start()
        assert play.wait(600) == 0, (host.folder / "play.log").read_text()
    finally:
        if play.poll() is None:
            play.kill()
        log.close()
    out = " ".join((host.folder / "play.log").read_text().split())
    assert f"samples are at {far.to}" in out
    host.assert_back(before)
    moved = host.play("move", extra=extra)
    assert moved.code == 0, moved.out
    assert os.listdir(output / "hidden_states") == []
    again = host.play("move", extra=extra)
    assert again.code == 0 and again.recap("changed") == 0, again.out
    there = host.play("extract", extra=extra)  # they count, wherever they are
    assert there.code == 0 and "nothing to do: all 64 samples are there" in " ".join(there.out.split()), there.out
    verified = subprocess.run(
        [CACHE / "engine/venv/bin/python", "-m", "sglang_hs_client", "verify", "--output", output, "--remote"],
        env={**os.environ, "PYTHONPATH": str(host.state / "lib")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert verified.returncode == 0 and "64 of them are at" in verified.stdout, verified.stdout + verified.stderr
    back = brought_back(far, tmp_path / "back")
    told_size = sum(path.stat().st_size for path in (back / "hidden_states").iterdir())
    assert told_size > 2.9 * used.total
    words = [
        str(CACHE / "engine/venv/bin/python"),
        "tests/engine/hf_reference.py",
        "--model",
        str(CACHE / "engine/model"),
    ]
    words += ["--dataset", str(DATASET), "--output", str(back), "--tolerance", "1e-4"]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 samples of" in judged("speculators-0.9", back, back, DATASET, tmp_path / "printed.py")
    exported = host.play("export", extra={"hs_formats": ["specforge"], "hs_output_dir": str(back)})
    assert exported.code == 0, exported.out
    assert "64 samples of" in judged("specforge", back, Path(f"{back}-specforge"), DATASET, tmp_path / "printed.py")


@pytest.fixture(scope="module")
def archives(host: Host, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The samples of a copy in archives, as move.yml leaves them in a folder of another disk."""
    copy = tmp_path_factory.mktemp("move") / "copy"
    shutil.copytree(finished, copy)
    place = copy.with_name("archives")
    extra = {
        "hs_output_dir": str(copy), "hs_move_to": str(place), "hs_rclone": str(remotes.program()),
        "hs_archive": "safetensors", "hs_archive_gb": 0.005,
    }  # fmt: skip
    played = host.play("move", extra=extra)
    assert played.code == 0, played.out
    assert 3 < len(os.listdir(place / "archives")) < 20 and not (place / "hidden_states").exists()
    return place


@pytest.mark.long
@pytest.mark.parametrize("reader", list(ARCHIVES))
def test_the_trainers_read_archives_in_place(host: Host, archives: Path, reader: str, tmp_path: Path) -> None:
    told = judged(reader, host.finished, archives, DATASET, tmp_path / "printed.py")
    assert "64 samples of" in told and told.count("spoiled (") == 3, told
    assert "the printed commands run" in told


@pytest.mark.long
def test_an_export_reads_archives_too(host: Host, archives: Path, tmp_path: Path) -> None:
    """The same bytes as from the single files."""
    for name, folder in (("single", host.finished), ("archived", archives)):
        extra = {"hs_formats": ["specforge"], "hs_output_dir": str(folder), "hs_export_dir": str(tmp_path / name)}
        played = host.play("export", extra=extra)
        assert played.code == 0, played.out
    files = sorted(path.relative_to(tmp_path / "single") for path in (tmp_path / "single").rglob("*.ckpt"))
    assert len(files) == COUNT
    for path in files:
        assert (tmp_path / "single" / path).read_bytes() == (tmp_path / "archived" / path).read_bytes()
    book = Manifest(archives, read_only=True)
    assert book.moved_counts()["moved"] == COUNT
    book.close()
