"""After an extraction and the return of production, the host is as it was, and has the hidden states."""

from __future__ import annotations

import json
from typing import Any

from testinfra.host import Host  # type: ignore[import-untyped]

testinfra_hosts = ["ansible://sglang"]


def test_production_unit_runs(host: Host, record: dict[str, Any]) -> None:
    """The unit is enabled, active and does not flap."""
    unit = host.service(record["unit"])
    assert unit.is_enabled
    assert unit.is_running
    assert host.check_output("systemctl show --value --property=NRestarts %s", record["unit"]) == "0"


def test_production_listens(host: Host, record: dict[str, Any]) -> None:
    """The port is open."""
    assert host.socket(f"tcp://127.0.0.1:{record['port']}").is_listening


def test_production_generates(host: Host, record: dict[str, Any]) -> None:
    """A real request gets a real answer."""
    answer = json.loads(host.check_output("/usr/local/bin/generate %s", str(record["port"])))
    assert len(answer["output_ids"]) == 4
    assert answer["meta_info"]["prompt_tokens"] == 3


def test_engine_source_is_pristine(host: Host, record: dict[str, Any]) -> None:
    """Not one byte of the engine's source differs from before."""
    assert host.check_output("/usr/local/bin/tree-hash %s", record["source"]) == record["source_hash"]


def test_no_stray_units(host: Host) -> None:
    """No unit of an extraction is left, not even a failed one."""
    for verb in ("list-units --all --plain", "list-unit-files"):
        assert host.run(f"systemctl {verb} --no-legend 'sglang-hs-*'").stdout == ""


def test_no_lock_left(host: Host) -> None:
    """Nobody holds the host: the run is closed, nothing of it is edited, dumped or running."""
    state = host.file("/var/lib/sglang-hs")
    assert state.is_directory
    assert {"lock", "journal.json"}.isdisjoint(state.listdir())
    assert host.file("/var/lib/sglang-hs/backup").listdir() == []
    assert not host.file("/dev/shm/sglang_hs").exists
    assert host.run("pgrep -fa sglang_hs").stdout == ""


def test_secrets_are_for_root_alone(host: Host) -> None:
    """Production's environment may hold secrets: nobody else reads it, and the run's copies of it are gone."""
    assert host.file("/var/lib/sglang-hs/production.json").mode == 0o600
    assert host.file("/var/lib/sglang-hs/runs").mode == 0o700
    assert host.check_output("find /var/lib/sglang-hs/runs -name '*.env' -o -name '*.job.json'") == ""


def test_the_run_was_closed_by_its_restore(host: Host) -> None:
    """The journal of the run tells the whole story, in order."""
    text = host.check_output("cat /var/lib/sglang-hs/runs/*/journal.json")
    journal = json.loads(text)
    assert journal["closed"]["outcome"] == "restored"
    done = [record["step"] for record in journal["steps"] if record["state"] == "done"]
    assert [step for step in done if not step.startswith("restore")] == ["begin", "patch", "stop", "launch", "extract"]
    assert done[-1] == "restore"


def test_all_samples_are_there(host: Host, record: dict[str, Any]) -> None:
    """Each sample has its file, and none is empty."""
    found = host.check_output(
        "find %s -type f -name %s -size +0 -printf '%%f\\n'", record["output_dir"], record["output_glob"]
    ).splitlines()
    assert len(found) == record["samples"]
    assert len(set(found)) == record["samples"]
