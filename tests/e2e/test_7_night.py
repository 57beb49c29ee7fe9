"""docs/night.md: each row's situation is made on a real server, its command is given as printed, and production is back."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_session import ROWS, Session, few_rows
from local_host import CACHE, REPO, Host, Played
from sglang_hs import fsio, procs, server
from test_1_reads_only import stranger

pytestmark = pytest.mark.long


@pytest.fixture
def session(host: Host) -> Iterator[Session]:
    """Production serves, nothing is extracted yet; each test leaves production serving."""
    output = host.folder / "night"
    shutil.rmtree(output, ignore_errors=True)
    extra = {"hs_dataset": str(few_rows(host.folder)), "hs_output_dir": str(output)}
    assert not (host.state / "journal.json").exists()
    server.generate(host.url)
    yield Session(host, output, extra)
    if (host.state / "journal.json").exists():
        host.play("restore")


@pytest.fixture
def before(host: Host) -> dict[str, Any]:
    return host.signature()


def flat(played: Played) -> str:
    return " ".join(played.out.split())


def samples(session: Session) -> int:
    return len(list((session.output / "hidden_states").glob("hs_*.safetensors")))


def begun(session: Session, step: str, **extra: Any) -> subprocess.Popen[str]:
    """extract.yml on its way, in ``step``."""
    playing = session.host.begin("extract", "-e", json.dumps({**session.extra, **extra}))
    session.host.wait_for(step, lambda: session.host.step_begun(step))
    return playing


def left_alone(session: Session, step: str, **extra: Any) -> None:
    """As begun(), and then the controller is gone."""
    playing = begun(session, step, **extra)
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()


def many_rows(session: Session) -> dict[str, str]:
    """A data set that takes a while."""
    path = session.host.folder / "many.jsonl"
    rows = (json.dumps({"input_ids": [7 + row % 500, 8 + row // 500, *range(9, 25)]}) + "\n" for row in range(20000))
    path.write_text("".join(rows))
    return {"hs_dataset": str(path)}


# -- production --------------------------------------------------------------------------------------------------------


def test_production_hangs(session: Session, before: dict[str, Any]) -> None:
    schedulers = [process for process in procs.family(session.host.production().pid) if "scheduler" in process.command]
    for process in schedulers:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        said = session.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
        assert "no run is open" in said and "does not answer" in said
        assert session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw").code == 2
        session.good(
            "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_production_expected=unhealthy"
        )
    finally:
        for process in schedulers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
    assert samples(session) == ROWS
    session.host.assert_back(before)


def test_production_s_port_is_held_when_it_shall_come_back(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch")
    session.host.wait_for("the free port", lambda: procs.port_free(session.host.port))
    with stranger(session.host.port):
        failed = session.doc("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
        assert failed.code == 2, failed.out
        told = re.search(r"is held by pid (\d+)", flat(failed))
        assert told, failed.out
        assert f"pid={told.group(1)}," in session.good("ss -ltnp")
    session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=True)
    session.host.assert_back(before)
    session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=False)


def test_somebody_started_production_by_hand_during_the_run(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch")
    session.host.wait_for("the free port", lambda: procs.port_free(session.host.port))
    session.host.start_production()
    pid = session.host.production().pid
    session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    assert session.host.production().pid == pid
    assert session.host.signature()["source"] == before["source"]
    session.host.assert_nothing_runs()


# -- the run -----------------------------------------------------------------------------------------------------------


def test_the_laptop_slept_and_another_operator_comes(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch", hs_operator="ann@elsewhere")
    said = session.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
    assert "of ann@elsewhere" in said and "production is back by" in said
    refused = session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert refused.code == 2 and "another operator's run is open on this host: ann@elsewhere" in flat(refused)
    said = session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_take_over=true")
    assert "going on with the open run of ann@elsewhere" in said
    assert samples(session) == ROWS
    session.host.assert_back(before)


def test_production_now_from_the_host_s_own_shell(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch")
    said = session.good("/var/lib/sglang-hs/hs status")
    assert "step: launch begun" in said
    session.good("/var/lib/sglang-hs/hs restore")
    session.host.assert_back(before)
    # the run that was gone is no obstacle
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert samples(session) == ROWS


def test_the_guard_is_not_alive(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch")
    guard = session.host.journal()["guard"]["pid"]
    assert str(guard) in session.good("pgrep -f 'sglang_hs guard'").split()
    os.kill(guard, signal.SIGKILL)
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    steps = json.loads(max((session.host.state / "runs").glob("*/journal.json"), key=os.path.getmtime).read_text())
    assert steps["guard"]["pid"] != guard
    assert samples(session) == ROWS
    session.host.assert_back(before)


def test_the_host_was_rebooted(session: Session, before: dict[str, Any]) -> None:
    """As far as one can without a boot: all that ran is gone, and the journal is of another boot. (test_6 cuts a real host's power.)"""
    left_alone(session, "launch")
    journal = session.host.journal()
    os.kill(journal["guard"]["pid"], signal.SIGKILL)
    for process in procs.everyone():
        if str(session.host.state) in process.command or str(session.host.port + 1) in process.argv:
            procs.signal_process(process, signal.SIGKILL)
    fsio.write_json(session.host.state / "journal.json", {**journal, "boot_id": "of-the-last-boot"})
    session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=True)
    session.host.assert_back(before)


def test_the_window_closed(session: Session, before: dict[str, Any]) -> None:
    more = {**many_rows(session), "hs_window": "90s", "hs_stop_timeout": 10}
    cut = session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=more)
    assert cut.code == 75, cut.out
    session.host.assert_back(before)
    kept = samples(session)
    assert 0 < kept < 20000
    again = session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=more)
    assert again.code == 75, again.out
    assert samples(session) > kept
    session.host.assert_back(before)


def test_the_extraction_server_died(session: Session, before: dict[str, Any]) -> None:
    playing = begun(session, "extract", **many_rows(session))
    session.host.wait_for("the first samples", lambda: samples(session) > 3)
    spec = fsio.read_json(session.host.state / "runs" / session.host.journal()["run_id"] / "server.state.json")
    for process in procs.family(spec["pid"]):
        procs.signal_process(process, signal.SIGKILL)
    assert playing.wait(timeout=400) == 2
    session.host.assert_back(before)
    shutil.rmtree(session.output)
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert samples(session) == ROWS


def test_the_extraction_s_port_is_held(session: Session, before: dict[str, Any]) -> None:
    with stranger(session.host.port + 1):
        refused = session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
        assert refused.code == 2 and "is taken by pid" in flat(refused)
        session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_extraction_port=31001")
    assert samples(session) == ROWS
    session.host.assert_back(before)


def test_a_gpu_is_held_by_a_stranger(session: Session, tmp_path: Path, before: dict[str, Any]) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    fake = tmp_path / "nvidia-smi"  # this machine has no GPU
    fake.write_text(
        "#!/bin/sh\n# a fake: one GPU, used by one process while that lives\n"
        f'case "$*" in *compute-apps*) test -e {tmp_path}/gone || echo "{sleeper.pid}, 1024";;'
        ' *) echo "0, NVIDIA RTX PRO 6000, 97887, 1024";; esac\n'
    )
    fake.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{session.host.env['PATH']}"}
    try:
        refused = session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", env=path)
        assert refused.code == 2 and f"a GPU is used by pid {sleeper.pid}" in flat(refused)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    (tmp_path / "gone").touch()
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --check --diff", env=path)
    session.host.assert_back(before)


# -- disks -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(place: Path, size: str) -> Iterator[None]:
    """A small file system in memory."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True)
    if done.returncode != 0:
        pytest.skip("no tmpfs can be mounted here: not root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_the_output_disk_is_full(session: Session, before: dict[str, Any]) -> None:
    disk = session.host.folder / "disk"
    with mounted(disk, "32m"):
        filler = disk / "filler"
        extra = {"hs_output_dir": str(disk / "out"), "hs_disk_reserve_gb": 0}
        session.output = disk / "out"

        def fill() -> None:
            session.host.wait_for("the launch", lambda: session.host.step_begun("launch"))
            with filler.open("wb") as handle:
                free = os.statvfs(disk)
                os.posix_fallocate(handle.fileno(), 0, max(free.f_bavail * free.f_frsize - 300_000, 1))

        filling = threading.Thread(target=fill)
        filling.start()
        failed = session.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=extra)
        filling.join()
        assert failed.code == 2 and "is full" in flat(failed), failed.out
        session.host.assert_back(before)
        filler.unlink()
        session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=extra)
        assert samples(session) == ROWS
    session.host.assert_back(before)


def test_dev_shm_is_too_small(session: Session, before: dict[str, Any]) -> None:
    session.good("df -h /dev/shm")
    small = session.host.folder / "small"
    with mounted(small, "1M"):
        refused = session.doc(
            "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra={"hs_dump_dir": str(small / "dumps")}
        )
        assert refused.code == 2 and "the dumps need up to" in flat(refused)
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_dump_dir=/data/sglang_hs")
    assert samples(session) == ROWS
    assert not (session.host.folder / "dumps").exists()
    session.host.assert_back(before)


# -- the states --------------------------------------------------------------------------------------------------------


def test_the_canary_refuses_another_checkpoint(session: Session, before: dict[str, Any]) -> None:
    other = session.host.folder / "other-model"
    if not other.exists():
        shutil.copytree(CACHE / "engine/model", other)
        tool = REPO / "roles/local_engine/files/tools/make_model.py"
        words = [str(session.engine_python), str(tool), str(other), "--arch", "kimi_k25", "--seed", "1"]
        env = {**session.host.env, "PYTHONPATH": str(CACHE / "engine/standins")}
        shutil.rmtree(other)
        subprocess.run(words, check=True, env=env, capture_output=True)
    refused = session.doc(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra={"hs_model_path": str(other)}
    )
    assert refused.code == 2, refused.out
    assert "canary" in flat(refused), refused.out
    assert samples(session) == 0
    session.host.assert_back(before)
    shutil.rmtree(session.output, ignore_errors=True)
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert samples(session) == ROWS


def test_files_are_not_trusted_and_what_is_in_quarantine(session: Session, before: dict[str, Any]) -> None:
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    victim = session.output / "hidden_states/hs_3.safetensors"
    good = victim.read_bytes()
    victim.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    found = session.doc(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client verify --output /data/hidden-states --checksums --redo"
    )
    assert found.code == 6, found.out
    assert not victim.exists()
    assert "sha256" in session.good("grep -h reason /data/hidden-states/quarantine/hs_*.json")
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert victim.stat().st_size == len(good)
    session.host.assert_back(before)


# -- the engine's source -----------------------------------------------------------------------------------------------


def test_somebody_edited_the_model_file_during_the_run(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch")
    edited = session.host.source.read_bytes()
    session.host.source.write_bytes(edited + b"# mine\n")
    failed = session.doc("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    assert failed.code == 2, failed.out
    assert "restore source" in flat(failed) and str(session.host.state / "backup") in flat(failed), failed.out
    server.generate(session.host.url)  # production is back all the same
    session.host.source.write_bytes(edited)
    session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    after = session.host.signature()
    assert after["source"] == before["source"]
    assert not (session.host.state / "journal.json").exists()


def test_the_package_was_upgraded_during_the_run(session: Session, before: dict[str, Any]) -> None:
    original = session.host.source.read_bytes()
    stat = session.host.source.stat()
    left_alone(session, "launch")
    new = original + b"# another release\n"
    session.host.source.write_bytes(new)
    said = session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    print(said)
    assert session.host.source.read_bytes() == new
    server.generate(session.host.url)
    session.host.source.write_bytes(original)
    os.utime(session.host.source, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_model_file_is_not_to_be_edited(session: Session, before: dict[str, Any]) -> None:
    inode = session.host.source.stat()
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_no_touch=true")
    assert samples(session) == ROWS
    assert session.host.source.stat().st_ctime_ns == inode.st_ctime_ns
    session.host.assert_back(before)


# -- the worst ---------------------------------------------------------------------------------------------------------


def test_the_state_folder_was_deleted_and_no_run_was_open(session: Session, before: dict[str, Any]) -> None:
    shutil.rmtree(session.host.state)
    session.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert samples(session) == ROWS
    session.host.assert_back(before)


def test_the_state_folder_was_deleted_while_a_run_was_open(session: Session, before: dict[str, Any]) -> None:
    left_alone(session, "launch")
    session.host.wait_for("the extraction server", lambda: procs.listeners(session.host.port + 1))
    shutil.rmtree(session.host.state)
    said = session.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=False)
    assert "nothing to restore" in said
    told = re.search(rf":{session.host.port + 1} .*?pid=(\d+),", session.doc("ss -ltnp").out)
    assert told
    session.good("kill PID", PID=told.group(1))
    session.host.wait_for("its end", lambda: procs.port_free(session.host.port + 1))
    session.host.start_production()
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --tags patch", changed=True)
    assert session.host.signature()["source"] == before["source"]
    assert not session.host.dumps.exists()
    session.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert samples(session) == ROWS
    session.host.assert_nothing_runs()
