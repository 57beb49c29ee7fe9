"""What must change nothing: check mode, and every kind of bad input - each with one clear message, production untouched."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from local_host import REPO, Host, Played
from sglang_hs import procs, server

Wrong = AbstractContextManager[dict[str, Any]]


def snapshot(host: Host) -> dict[str, Any]:
    """Process ids, and hash and mtime of every file of the host's folder that a run could write."""
    files = {}
    skipped = ("home", "__pycache__", "play.log", "production.log")
    for path in sorted(host.folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not set(path.relative_to(host.folder).parts) & set(skipped):
            files[str(path)] = (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
    family = sorted(process.pid for process in procs.family(host.production().pid))
    return {"files": files, "family": family, "dumps": host.dumps.exists()}


def test_check_and_diff_change_nothing_and_show_the_edit_and_the_command(host: Host) -> None:
    before = snapshot(host)
    played = host.play("extract", "--check", "--diff")
    assert played.code == 0, played.out
    assert snapshot(host) == before
    assert "+            _hs_capture.attach(self)" in played.out
    for line in (
        "---num-continuous-decode-steps 4",
        "+--max-running-requests 1",
        "+--disable-radix-cache",
        "+NCCL_PROTO=LL",
    ):
        assert line in played.out, line
    assert played.recap("changed") > 0


def test_plan_shows_what_would_be_done_and_changes_nothing(host: Host) -> None:
    before = snapshot(host)
    played = host.play("plan")
    assert played.code == 0, played.out
    assert snapshot(host) == before
    for line in (
        "+            _hs_capture.attach(self)",
        "+--max-running-requests 1",
        "1,024 tokens",
        " afterwards; dumps up to",
    ):
        assert line in played.out, line


def test_status_tells_and_writes_it_down(host: Host, tmp_path: Path) -> None:
    before = snapshot(host)
    played = host.play("status", extra={"hs_status_file": str(tmp_path / "status.json")})
    assert played.code == 0, played.out
    assert (played.recap("changed"), snapshot(host)) == (0, before)
    assert "no run is open" in played.out and "engine source: as it was" in played.out
    assert json.loads((tmp_path / "status.json").read_text())["localhost"]["open"] is False


def row_file(host: Host, text: str) -> Wrong:
    """A data set of one good row and ``text``."""
    path = host.folder / "wrong.jsonl"
    path.write_text('{"input_ids": [5, 6], "loss_mask": [0, 1]}\n' + text + "\n")
    return nullcontext({"hs_dataset": str(path)})


@contextmanager
def stranger(port: int) -> Iterator[dict[str, Any]]:
    """Somebody else's server, which serves files."""
    words = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    try:
        while procs.port_free(port):
            pass
        yield {}
        assert process.poll() is None, "a stranger's process was ended"
    finally:
        process.kill()
        process.wait()


@contextmanager
def not_a_model_server(host: Host) -> Iterator[dict[str, Any]]:
    port = host.port + 1
    with stranger(port):
        yield {"hs_production_port": port, "hs_extraction_port": port + 1}


@contextmanager
def small_memory(host: Host) -> Iterator[dict[str, Any]]:
    place = host.folder / "small"
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(place)], check=True)
    try:
        yield {"hs_dump_dir": str(place / "dumps")}
    finally:
        subprocess.run(["umount", str(place)], check=True)


@contextmanager
def unknown_release(host: Host) -> Iterator[dict[str, Any]]:
    """The engine's file with its class renamed: a release of the future."""
    kept, times = host.source.read_bytes(), host.source.stat()
    host.source.write_bytes(kept.replace(b"class DeepseekV2Model(", b"class DeepseekV9Model("))
    try:
        yield {}
    finally:
        host.source.write_bytes(kept)
        os.utime(host.source, ns=(times.st_atime_ns, times.st_mtime_ns))


@contextmanager
def immutable_source(host: Host) -> Iterator[dict[str, Any]]:
    subprocess.run(["chattr", "+i", str(host.source)], check=True)
    try:
        yield {}
    finally:
        subprocess.run(["chattr", "-i", str(host.source)], check=True)


@contextmanager
def foreign_output(host: Host) -> Iterator[dict[str, Any]]:
    place = host.folder / "foreign"
    place.mkdir(exist_ok=True)
    (place / "thesis.txt").write_text("years of work\n")
    yield {"hs_output_dir": str(place)}
    assert (place / "thesis.txt").read_text() == "years of work\n"


def given(**extra: Any) -> Callable[[Host], Wrong]:
    return lambda host: nullcontext(extra)


WRONG: list[tuple[str, Callable[[Host], Wrong], str]] = [
    ("no such data set", given(hs_dataset="/nowhere.jsonl"), "there is no data set at /nowhere.jsonl"),
    ("row without input_ids", lambda host: row_file(host, '{"text": "hello"}'), "wrong.jsonl:2: no input_ids"),
    ("no JSON", lambda host: row_file(host, "hello"), "wrong.jsonl:2: not JSON"),
    ("id out of the vocabulary", lambda host: row_file(host, '{"input_ids": [5, 512]}'), "input_ids[1] is 512, outside the vocabulary of 512"),
    ("mask of another length", lambda host: row_file(host, '{"input_ids": [5, 6], "loss_mask": [1]}'), "loss_mask has 1 entries for 2 input_ids"),
    ("empty row", lambda host: row_file(host, '{"input_ids": []}'), "input_ids is empty"),
    ("longer than the context", lambda host: row_file(host, json.dumps({"input_ids": [7] * 17000})), "17000 tokens, the server takes"),
    ("no engine package", given(hs_engine_python=sys.executable), "has no package sglang"),
    ("no such interpreter", given(hs_engine_python="/no/such/python"), "/no/such/python is not a Python interpreter"),
    ("not an interpreter", given(hs_engine_python="/bin/true"), "/bin/true does not work as a Python interpreter"),
    ("unknown release", unknown_release, "DeepseekV2Model"),
    ("no such model", given(hs_model_path="/nowhere"), "the model path /nowhere is not a folder"),
    ("boundary past the last layer", given(hs_boundaries=[1, 5]), "does not fit a model of 5 layers"),
    ("production does not run", lambda host: nullcontext({"hs_production_port": host.port + 2}), "production does not run: nobody listens on port"),
    ("production is not healthy", not_a_model_server, "is not healthy"),
    ("production runs although it is said to be down", given(hs_production_expected="stopped"), "hs_production_expected is stopped, yet pid"),
    ("port taken", lambda host: stranger(host.port + 1), "is taken by pid"),
    ("too little memory for dumps", small_memory, "the dumps need up to"),
    ("too little disk", given(hs_disk_reserve_gb=10_000_000), "are to stay free, but"),
    ("source that may not be written", immutable_source, "immutable"),
    ("dump folder that is no folder of its own", given(hs_dump_dir="/dev/shm"), "not a folder of its own"),
    ("output folder with strangers' files", foreign_output, "holds files that are not ours: thesis.txt"),
    ("a final state that a format does not read", given(hs_formats=["specforge"], hs_final="pre_norm"), "but specforge (in hs_formats) reads the post_norm"),
    ("no window", given(hs_window="soon"), "which is no length of time"),
    ("an option that the release does not know", given(hs_extra_arguments=["--no-such-option"]), "knows no option --no-such-option"),
    ("a role's argument of another type", given(hs_retries="many"), "'hs_retries' is of type str and we were unable to convert to int"),
    ("unsafe layout", given(hs_extra_arguments=["--pp-size", "2"]), "pipeline parallel"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_bad_input_is_one_message_and_production_is_untouched(
    host: Host, wrong: Callable[[Host], Wrong], message: str
) -> None:
    before = host.signature()
    with wrong(host) as extra:
        played = host.play("extract", extra=extra)
    refused(played, message)
    assert host.signature() == before
    assert not host.samples.exists()
    assert not (host.state / "lock").exists()
    assert server.healthy(host.url) is None


def refused(played: Played, message: str) -> None:
    assert played.code == 2, played.out
    # YAML folds long messages over lines
    flat = " ".join(played.out.split())
    assert message in flat, played.out
    assert "Next:" in flat, played.out
    # once, as a message: neither what the module returned nor a role's whole specification
    assert flat.count("fatal: [") == 1 and "[ERROR]" not in flat and "argument_spec_data" not in flat, played.out
    assert "Traceback" not in played.out


def test_a_strangers_process_on_a_gpu_is_named_and_left_alone(host: Host, tmp_path: Path) -> None:
    # this machine has no GPU: nvidia-smi is a fake, which says what a host with one would say
    sleeper = subprocess.Popen(["sleep", "600"])
    fake = tmp_path / "nvidia-smi"
    fake.write_text(
        "#!/bin/sh\n# a fake: one GPU, used by one process\n"
        f'case "$*" in *compute-apps*) echo "GPU-1, {sleeper.pid}, 1024";; *uuid*) echo "GPU-1, 1024";; *) echo "0, NVIDIA RTX PRO 6000, 97887, 1024";; esac\n'
    )
    fake.chmod(0o755)
    try:
        played = host.play("extract", path=str(tmp_path))
        refused(played, f"a GPU is used by pid {sleeper.pid}")
        assert "sleep 600" in played.out
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_production_that_does_not_answer_is_refused_unless_that_is_meant(host: Host) -> None:
    before = host.signature()
    schedulers = [process for process in procs.family(host.production().pid) if "scheduler" in process.command]
    assert schedulers
    for process in schedulers:
        os.kill(process.pid, signal.SIGSTOP)  # a hanging scheduler: the port still answers, generations do not
    try:
        refused(host.play("extract"), "is not healthy")
        meant = host.play("extract", "--check", extra={"hs_production_expected": "unhealthy"})
    finally:
        for process in schedulers:
            os.kill(process.pid, signal.SIGCONT)
    assert meant.code == 0, meant.out
    assert host.signature() == before


def test_what_only_the_operator_knows_is_asked_for_by_file_and_line(host: Host) -> None:
    played = subprocess.run(
        host.command("extract", inventory="rtx6000bw"),
        cwd=REPO,
        env=host.env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert played.returncode == 2
    asked = {
        "ansible_host": "hosts.yml",
        "hs_dataset": "group_vars/sglang.yml",
        "hs_output_dir": "group_vars/sglang.yml",
    }
    for name, file in {**asked, "hs_model_path": "group_vars/sglang.yml"}.items():
        lines = (REPO / "inventory/rtx6000bw" / file).read_text().splitlines()
        number = next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f"{name}:"))
        assert f"inventory/rtx6000bw/{file}:{number}" in played.stdout, name
    assert "Left as it was" in played.stdout


@pytest.mark.parametrize("inventory", ["local", "rtx6000bw"])
def test_the_playbooks_can_be_looked_at(host: Host, inventory: str) -> None:
    def said(*words: str) -> str:
        done = subprocess.run(words, cwd=REPO, env=host.env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    for book in ("extract", "restore", "export", "plan", "status"):
        assert f"playbook: playbooks/{book}.yml" in said(*host.command(book, "--syntax-check", inventory=inventory))
        assert "play #1 (sglang)" in said(*host.command(book, "--list-tasks", inventory=inventory))
        assert "always" in said(*host.command(book, "--list-tags", inventory=inventory))
    assert "@sglang" in said("ansible-inventory", "-i", f"inventory/{inventory}", "--graph")
