"""The journal and the lock: one run at a time, its holder named, every record on disk before the next thing happens."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_hs import errors, fsio, production, restore, steps, turns, units
from sglang_hs.errors import HsError
from sglang_hs.journal import Journal, Paths

VIEW: dict[str, Any] = {
    "settings": {"window_s": 3600, "stop_timeout": 5, "extraction_port": 1, "dump_dir": "/nowhere"},
    "flags": {"key": "k", "names": []},
}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(str(tmp_path / "state"))
    found.make()
    return found


def begun(paths: Paths, operator: str = "me@laptop", wanted: dict[str, Any] | None = None) -> Journal:
    return Journal.open(paths, operator, VIEW, wanted or {"window": "1h"}, {"argv": ["x"], "expected": "running"})


def test_a_second_run_gets_the_holders_name(paths: Paths) -> None:
    begun(paths)
    with pytest.raises(HsError, match="another run holds this host.*me@laptop"):
        begun(paths, "you@desk")


def test_records_are_on_disk_before_and_after_a_step(paths: Paths) -> None:
    journal = begun(paths)
    with journal.step("stop", 60):
        on_disk = json.loads(paths.journal.read_text())
        assert on_disk["steps"][-1]["state"] == "begun"
        assert on_disk["lease"]["step"] == "stop"
    with pytest.raises(ValueError, match="broken"), journal.step("launch", 60):
        raise ValueError("broken\nand more")
    states = [
        (record["step"], record["state"], record["detail"]) for record in json.loads(paths.journal.read_text())["steps"]
    ]
    assert states == [
        ("stop", "begun", ""),
        ("stop", "done", ""),
        ("launch", "begun", ""),
        ("launch", "failed", "broken"),
    ]


def test_a_closed_run_is_kept_and_the_host_is_free(paths: Paths) -> None:
    journal = begun(paths)
    journal.close("restored", "the run is over")
    assert Journal.load(paths) is None
    assert not paths.lock.exists()
    kept = json.loads((paths.run(journal.run_id) / "journal.json").read_text())
    assert kept["closed"]["outcome"] == "restored"
    with pytest.raises(HsError, match="no longer open: the run is over"):
        Journal.require(paths, journal.run_id)
    begun(paths)


def test_nobody_else_reads_the_journal_or_productions_environment(paths: Paths) -> None:
    begun(paths)
    for path in (paths.journal, paths.lock, paths.production, paths.flags):
        assert path.stat().st_mode & 0o777 == 0o600
    assert paths.state.stat().st_mode & 0o777 == 0o711
    assert paths.runs.stat().st_mode & 0o777 == 0o700


def test_the_state_folder_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(HsError, match="not a plain folder"):
        Paths(str(tmp_path / "link")).make()


def test_the_same_operator_goes_on_with_the_same_wishes_only(paths: Paths) -> None:
    journal = begun(paths)
    steps.may_attach(journal, {"window": "1h"}, "me@laptop", False)
    with pytest.raises(HsError, match="window='1h' there, '2h' here"):
        steps.may_attach(journal, {"window": "2h"}, "me@laptop", False)
    with pytest.raises(HsError, match="another operator's run is open"):
        steps.may_attach(journal, {"window": "1h"}, "you@desk", False)
    steps.may_attach(journal, {"window": "1h"}, "you@desk", True)


def test_a_run_is_watched_over_before_it_is_open(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is cut, or a host that dies, between the two would leave a run that nobody ever closes."""
    armed = []

    def arm(files: dict[str, str]) -> bool:
        armed.append((dict(files), paths.journal.exists()))
        return True

    monkeypatch.setattr(production, "has_units", lambda: True)
    monkeypatch.setattr(production, "take", lambda settings, key: {"argv": ["x"], "expected": "stopped"})
    monkeypatch.setattr(units, "arm", arm)
    files = {"/a/sglang-hs-guard.timer": "look", "/b/sglang-hs-client.service": "runs/@RUN@/spec"}
    made = steps.begin(str(paths.state), VIEW, {"window": "1h"}, "me@laptop", unit_files=files)
    client = {"/b/sglang-hs-client.service": f"runs/{made['run_id']}/spec"}
    guard = {"/a/sglang-hs-guard.timer": "look"}
    assert armed == [(guard, False), (guard | client, True)]
    assert steps.begin(str(paths.state), VIEW, {"window": "1h"}, "me@laptop", unit_files=files)["attached"]
    assert armed[2:] == [(guard | client, True)]


def test_a_lock_whose_run_never_began_is_taken_away_by_the_guard(paths: Paths) -> None:
    paths.lock.write_text("{}")
    assert restore.guard_once(str(paths.state)) is not None and paths.lock.exists()  # it may just be beginning
    os.utime(paths.lock, (0, 0))
    assert restore.guard_once(str(paths.state)) is None and not paths.lock.exists()


def test_no_step_goes_forward_once_a_restore_has_begun(paths: Paths) -> None:
    journal = begun(paths)
    journal.record("restore", "begun")
    with pytest.raises(HsError, match="a restore of run .* has begun"):
        turns.forward(paths, journal.run_id)
    with pytest.raises(HsError, match="is being restored right now"):
        steps.may_attach(journal, {"window": "1h"}, "me@laptop", False)


def test_a_writer_that_is_killed_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    fsio.write_json(path, {"steps": list(range(100))})
    library = str(Path(fsio.__file__).parents[1])
    code = (
        f"import sys; sys.path.insert(0, {library!r})\n"
        "from pathlib import Path; from sglang_hs import fsio\n"
        f"while True: fsio.write_json(Path({str(path)!r}), {{'steps': list(range(100))}})"
    )
    for _ in range(10):
        writer = subprocess.Popen([sys.executable, "-c", code])
        try:
            writer.wait(timeout=0.15)
        except subprocess.TimeoutExpired:
            writer.kill()
        writer.wait()
        assert fsio.read_json(path) == {"steps": list(range(100))}


def test_a_broken_journal_is_named_not_guessed_at(paths: Paths) -> None:
    paths.journal.write_text("{")
    with pytest.raises(HsError, match="journal.json is not readable as JSON"):
        Journal.load(paths)


def test_the_mutex_is_freed_by_its_holders_death(tmp_path: Path) -> None:
    path = tmp_path / "mutex"
    library = str(Path(fsio.__file__).parents[1])
    code = (
        f"import sys, os; sys.path.insert(0, {library!r})\n"
        "from pathlib import Path; from sglang_hs import fsio\n"
        f"with fsio.mutex(Path({str(path)!r})): print('held', flush=True); os.read(0, 1)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(HsError, match="another step of this project is at work"), fsio.mutex(path, 0.2):
        pass
    holder.kill()
    holder.wait()
    with fsio.mutex(path):
        assert os.path.exists(path)


def test_a_refusal_of_the_system_names_the_file_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as write and fsync raise it: without a name

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as met:
        fsio.write_json(tmp_path / "journal.json", {})
    message = str(errors.told(met.value))
    assert message.startswith(f"{tmp_path}/journal.json: No space left on device\nLeft as it was: ")
    assert "Next: free some space on its file system" in message
    assert list(tmp_path.iterdir()) == []
    assert "owner, mode" in str(errors.told(PermissionError(errno.EACCES, "no", "/etc/x")))
