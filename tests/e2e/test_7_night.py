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
from docs_run import ROWS, Pages, few_rows
from local_host import CACHE, REPO, Host, Played
from sglang_hs import fsio, procs, server
from test_1_reads_only import stranger

pytestmark = pytest.mark.long
ROWS_OF_MANY = 60000  # more than any machine extracts in the windows of these tests


@pytest.fixture(scope="module")
def known(host: Host) -> None:
    """The host had a run before: what production is, status only knows from one."""
    if not (host.state / "production.json").exists():
        extra = {"hs_dataset": str(few_rows(host.folder)), "hs_output_dir": str(host.folder / "before")}
        played = host.play("extract", extra=extra)
        assert played.code == 0, played.out


@pytest.fixture
def pages(host: Host, known: None) -> Iterator[Pages]:
    """Production serves, nothing is extracted yet; each test leaves production serving."""
    output = host.folder / "night"
    shutil.rmtree(output, ignore_errors=True)
    extra = {"hs_dataset": str(few_rows(host.folder)), "hs_output_dir": str(output)}
    assert not (host.state / "journal.json").exists()
    server.generate(host.url)
    yield Pages(host, output, extra)
    if (host.state / "journal.json").exists():
        host.play("restore")


@pytest.fixture
def before(host: Host) -> dict[str, Any]:
    return host.signature()


def flat(played: Played) -> str:
    return " ".join(played.out.split())


def samples(pages: Pages) -> int:
    return len(list((pages.output / "hidden_states").glob("hs_*.safetensors")))


def begun(pages: Pages, step: str, **extra: Any) -> subprocess.Popen[str]:
    """extract.yml on its way, in ``step``."""
    playing = pages.host.begin("extract", "-e", json.dumps({**pages.extra, **extra}))
    pages.host.wait_for(step, lambda: pages.host.step_begun(step))
    return playing


def left_alone(pages: Pages, step: str, **extra: Any) -> None:
    """As begun(), and then the controller is gone."""
    playing = begun(pages, step, **extra)
    os.killpg(playing.pid, signal.SIGKILL)
    playing.wait()


def many_rows(pages: Pages) -> dict[str, str]:
    """A data set that takes a while."""
    path = pages.host.folder / "many.jsonl"
    rows = (
        json.dumps({"input_ids": [7 + row % 500, 8 + row // 500, *range(9, 25)]}) + "\n" for row in range(ROWS_OF_MANY)
    )
    path.write_text("".join(rows))
    return {"hs_dataset": str(path)}


# -- production --------------------------------------------------------------------------------------------------------


def test_production_hangs(pages: Pages, before: dict[str, Any]) -> None:
    schedulers = [process for process in procs.family(pages.host.production().pid) if "scheduler" in process.command]
    for process in schedulers:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        said = pages.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
        assert "no run is open" in said and "does not answer" in said
        assert pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw").code == 2
        pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_production_expected=unhealthy")
    finally:
        for process in schedulers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
    assert samples(pages) == ROWS
    pages.host.assert_back(before)


def test_production_s_port_is_held_when_it_shall_come_back(pages: Pages, before: dict[str, Any]) -> None:
    left_alone(pages, "launch")
    pages.host.wait_for("the free port", lambda: procs.port_free(pages.host.port))
    with stranger(pages.host.port):
        failed = pages.doc("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
        assert failed.code == 2, failed.out
        told = re.search(r"is held by pid (\d+)", flat(failed))
        assert told, failed.out
        assert f"pid={told.group(1)}," in pages.good("ss -ltnp")
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=True)
    pages.host.assert_back(before)
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=False)


def test_another_s_run_is_not_ended_unasked_and_production_started_by_hand_is_left_alone(
    pages: Pages, before: dict[str, Any]
) -> None:
    left_alone(pages, "launch", hs_operator="ann@elsewhere")
    refused = pages.doc("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    assert refused.code == 2 and "another operator's run is at work on this host: ann@elsewhere" in flat(refused)
    pages.host.wait_for("the free port", lambda: procs.port_free(pages.host.port))
    pages.host.start_production()
    pid = pages.host.production().pid
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw -e hs_take_over=true")
    assert pages.host.production().pid == pid
    assert pages.host.signature()["source"] == before["source"]
    pages.host.assert_nothing_runs()


# -- the run -----------------------------------------------------------------------------------------------------------


def test_the_laptop_slept_the_guard_died_and_another_operator_comes(pages: Pages, before: dict[str, Any]) -> None:
    left_alone(pages, "launch", hs_operator="ann@elsewhere")
    said = pages.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
    assert "of ann@elsewhere" in said and "production is back by" in said
    refused = pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert refused.code == 2 and "another operator's run is open on this host: ann@elsewhere" in flat(refused)
    guard = pages.host.journal()["guard"]["pid"]
    assert str(guard) in pages.good("pgrep -f 'sglang_hs guard'").split()
    os.kill(guard, signal.SIGKILL)
    said = pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_take_over=true")
    assert "going on with the open run of ann@elsewhere" in said
    closed = max((pages.host.state / "runs").glob("*/journal.json"), key=os.path.getmtime)
    assert json.loads(closed.read_text())["guard"]["pid"] != guard
    assert samples(pages) == ROWS
    pages.host.assert_back(before)


def test_production_now_from_the_host_s_own_shell(pages: Pages, before: dict[str, Any]) -> None:
    left_alone(pages, "launch")
    said = pages.good("/var/lib/sglang-hs/hs status")
    assert "step: launch begun" in said
    pages.good("/var/lib/sglang-hs/hs restore")
    pages.host.assert_back(before)


def test_the_host_was_rebooted(pages: Pages, before: dict[str, Any]) -> None:
    """As far as one can without a boot: all that ran is gone, and the journal is of another boot. (test_6 cuts a real host's power.)"""
    left_alone(pages, "launch")
    journal = pages.host.journal()
    os.kill(journal["guard"]["pid"], signal.SIGKILL)
    for process in procs.everyone():
        if str(pages.host.state) in process.command or str(pages.host.port + 1) in process.argv:
            procs.signal_process(process, signal.SIGKILL)
    fsio.write_json(pages.host.state / "journal.json", {**journal, "boot_id": "of-the-last-boot"})
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=True)
    pages.host.assert_back(before)


def test_the_window_closed(pages: Pages, before: dict[str, Any]) -> None:
    out = pages.host.folder / "cut.json"
    more = {**many_rows(pages), "hs_window": "240s", "hs_stop_timeout": 10, "hs_result_file": str(out)}
    cut = pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=more)
    assert cut.code == 75, cut.out
    pages.host.assert_back(before)
    kept = samples(pages)
    assert 0 < kept < ROWS_OF_MANY
    result = json.loads(out.read_text())
    assert (result["outcome"], result["samples"], result["production"]) == ("window", kept, "back")
    again = pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=more)
    assert again.code == 75, again.out
    assert samples(pages) > kept
    pages.host.assert_back(before)


def test_the_extraction_server_died(pages: Pages, before: dict[str, Any]) -> None:
    playing = begun(pages, "extract", **many_rows(pages))
    pages.host.wait_for("the first samples", lambda: samples(pages) > 3)
    spec = fsio.read_json(pages.host.state / "runs" / pages.host.journal()["run_id"] / "server.state.json")
    for process in procs.family(spec["pid"]):
        procs.signal_process(process, signal.SIGKILL)
    assert playing.wait(timeout=400) == 2
    pages.host.assert_back(before)


def test_the_extraction_s_port_is_held(pages: Pages, before: dict[str, Any]) -> None:
    with stranger(pages.host.port + 1):
        refused = pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
        assert refused.code == 2 and "is taken by pid" in flat(refused)
        pages.good(
            "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_extraction_port=31001", check=True
        )
    pages.host.assert_back(before)


def test_a_gpu_is_held_by_a_stranger(pages: Pages, tmp_path: Path, before: dict[str, Any]) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    fake = tmp_path / "nvidia-smi"  # this machine has no GPU
    fake.write_text(
        "#!/bin/sh\n# a fake: one GPU, used by one process while that lives\n"
        f'case "$*" in *compute-apps*) test -e {tmp_path}/gone || echo "GPU-fake, {sleeper.pid}, 1024";;'
        ' *uuid,memory.used*) echo "GPU-fake, 1024";; *) echo "0, NVIDIA RTX PRO 6000, 97887, 1024";; esac\n'
    )
    fake.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{pages.host.env['PATH']}"}
    try:
        refused = pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", env=path)
        assert refused.code == 2 and f"a GPU is used by pid {sleeper.pid}" in flat(refused)
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    (tmp_path / "gone").touch()
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", env=path, check=True)
    pages.host.assert_back(before)


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


def test_the_output_disk_is_full(pages: Pages, before: dict[str, Any]) -> None:
    disk = pages.host.folder / "disk"
    with mounted(disk, "32m"):
        filler = disk / "filler"
        extra = {"hs_output_dir": str(disk / "out"), "hs_disk_reserve_gb": 0}
        pages.output = disk / "out"

        def fill() -> None:
            pages.host.wait_for("the launch", lambda: pages.host.step_begun("launch"))
            with filler.open("wb") as handle:
                free = os.statvfs(disk)
                os.posix_fallocate(handle.fileno(), 0, max(free.f_bavail * free.f_frsize - 300_000, 1))

        filling = threading.Thread(target=fill)
        filling.start()
        failed = pages.doc("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=extra)
        filling.join()
        assert failed.code == 2 and "is full" in flat(failed), failed.out
        pages.host.assert_back(before)
        filler.unlink()
        pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra=extra)
        assert samples(pages) == ROWS
    pages.host.assert_back(before)


def test_how_did_it_end_and_what_takes_the_room(pages: Pages, before: dict[str, Any]) -> None:
    old = Path(f"{pages.output}-old")
    shutil.rmtree(old, ignore_errors=True)
    pages.extra["hs_output_dir"] = str(old)
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    (document,) = (old / "runs").glob("*.json")
    (page,) = (pages.host.folder / "reports").glob(f"*-{document.stem}.html")
    page.unlink()
    pages.good("ansible-playbook playbooks/report.yml -i inventory/rtx6000bw", changed=True)
    assert page.exists()
    pages.extra["hs_output_dir"] = str(pages.output)  # the next one
    said = pages.good("ansible-playbook playbooks/clean.yml -i inventory/rtx6000bw", changed=False)
    assert f"output {old}: {ROWS} of {ROWS} samples, complete" in said
    pages.good(
        "ansible-playbook playbooks/clean.yml -i inventory/rtx6000bw -e hs_clean=/data/hidden-states-old", changed=True
    )
    assert not old.exists()
    pages.host.assert_back(before)


def test_dev_shm_is_too_small(pages: Pages, before: dict[str, Any]) -> None:
    pages.good("df -h /dev/shm")
    small = pages.host.folder / "small"
    with mounted(small, "1M"):
        refused = pages.doc(
            "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra={"hs_dump_dir": str(small / "dumps")}
        )
        assert refused.code == 2 and "the dumps need up to" in flat(refused)
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_dump_dir=/data/sglang_hs")
    assert samples(pages) == ROWS
    assert not (pages.host.folder / "dumps").exists()
    pages.host.assert_back(before)


# -- the states --------------------------------------------------------------------------------------------------------


def test_the_canary_refuses_another_checkpoint(pages: Pages, before: dict[str, Any]) -> None:
    other = pages.host.folder / "other-model"
    if not other.exists():
        shutil.copytree(CACHE / "engine/model", other)
        tool = REPO / "roles/local_engine/files/tools/make_model.py"
        words = [str(pages.engine_python), str(tool), str(other), "--arch", "kimi_k25", "--seed", "1"]
        env = {**pages.host.env, "PYTHONPATH": str(CACHE / "engine/standins")}
        shutil.rmtree(other)
        subprocess.run(words, check=True, env=env, capture_output=True)
    refused = pages.doc(
        "ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw", extra={"hs_model_path": str(other)}
    )
    assert refused.code == 2, refused.out
    assert "canary" in flat(refused), refused.out
    assert samples(pages) == 0
    pages.host.assert_back(before)


def test_files_are_not_trusted_and_what_is_in_quarantine(pages: Pages, before: dict[str, Any]) -> None:
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    victim = pages.output / "hidden_states/hs_3.safetensors"
    good = victim.read_bytes()
    victim.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    found = pages.doc(
        "PYTHONPATH=/var/lib/sglang-hs/lib /opt/sglang/bin/python -m sglang_hs_client verify --output /data/hidden-states --checksums --redo"
    )
    assert found.code == 6, found.out
    assert not victim.exists()
    assert "sha256" in pages.good("grep -h reason /data/hidden-states/quarantine/hs_*.json")
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert victim.stat().st_size == len(good)
    pages.host.assert_back(before)


# -- the engine's source -----------------------------------------------------------------------------------------------


def test_somebody_edited_the_model_file_during_the_run(pages: Pages, before: dict[str, Any]) -> None:
    left_alone(pages, "launch")
    edited = pages.host.source.read_bytes()
    pages.host.source.write_bytes(edited + b"# mine\n")
    failed = pages.doc("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    assert failed.code == 2, failed.out
    assert "restore source" in flat(failed) and str(pages.host.state / "backup") in flat(failed), failed.out
    server.generate(pages.host.url)  # production is back all the same
    pages.host.source.write_bytes(edited)
    pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    after = pages.host.signature()
    assert after["source"] == before["source"]
    assert not (pages.host.state / "journal.json").exists()


def test_the_package_was_upgraded_during_the_run(pages: Pages, before: dict[str, Any]) -> None:
    original = pages.host.source.read_bytes()
    stat = pages.host.source.stat()
    left_alone(pages, "launch")
    new = original + b"# another release\n"
    pages.host.source.write_bytes(new)
    said = pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw")
    assert "was replaced since it was patched; it holds nothing of ours and was left alone" in said
    assert pages.host.source.read_bytes() == new
    server.generate(pages.host.url)
    pages.host.source.write_bytes(original)
    os.utime(pages.host.source, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    shutil.rmtree(pages.host.state / "backup/stale")  # the old file's backup was set aside


def test_the_model_file_is_not_to_be_edited(pages: Pages, before: dict[str, Any]) -> None:
    inode = pages.host.source.stat()
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw -e hs_no_touch=true")
    assert samples(pages) == ROWS
    assert pages.host.source.stat().st_ctime_ns == inode.st_ctime_ns
    pages.host.assert_back(before)


# -- the worst ---------------------------------------------------------------------------------------------------------


def test_the_state_folder_was_deleted_and_no_run_was_open(pages: Pages, before: dict[str, Any]) -> None:
    shutil.rmtree(pages.host.state)
    pages.good("ansible-playbook playbooks/status.yml -i inventory/rtx6000bw", changed=False)
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw")
    assert samples(pages) == ROWS
    pages.host.assert_back(before)


def test_the_state_folder_was_deleted_while_a_run_was_open(pages: Pages, before: dict[str, Any]) -> None:
    left_alone(pages, "launch")
    pages.host.wait_for("the extraction server", lambda: procs.listeners(pages.host.port + 1))
    shutil.rmtree(pages.host.state)
    said = pages.good("ansible-playbook playbooks/restore.yml -i inventory/rtx6000bw", changed=False)
    assert "nothing to restore" in said
    told = re.search(rf":{pages.host.port + 1} .*?pid=(\d+),", pages.doc("ss -ltnp").out)
    assert told
    pages.good("kill PID", PID=told.group(1))
    pages.host.wait_for("its end", lambda: procs.port_free(pages.host.port + 1))
    pages.host.start_production()
    pages.good("ansible-playbook playbooks/extract.yml -i inventory/rtx6000bw --tags patch", changed=True)
    assert pages.host.signature()["source"] == before["source"]
    assert not pages.host.dumps.exists()
    pages.host.assert_nothing_runs()
