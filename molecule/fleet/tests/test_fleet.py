"""After a host was lost in the middle and came back: a complete data set, each row exact, and every host in production."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
from array import array
from pathlib import Path
from typing import Any

from testinfra.host import Host  # type: ignore[import-untyped]

testinfra_hosts = ["ansible://sglang"]
ROOT = Path(__file__).resolve().parents[3]
OUTPUT = "/var/lib/hidden-states"


def tensors(path: Path) -> dict[str, bytes]:
    """Name -> bytes of each tensor of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    return {
        name: data[8 + size + one["data_offsets"][0] : 8 + size + one["data_offsets"][1]]
        for name, one in header.items()
        if name != "__metadata__"
    }


def cache() -> Path:
    """The engine's."""
    return Path(os.environ.get("HS_CACHE") or Path.home() / ".cache/sglang-hidden-states")


def test_production_generates_everywhere(host: Host) -> None:
    """A real request gets a real answer, also on the host that was lost."""
    assert len(json.loads(host.check_output("/usr/local/bin/generate 30000"))["output_ids"]) == 4
    assert host.service("sglang.service").is_running


def test_nothing_of_a_run_is_left(host: Host) -> None:
    """No lock, no journal, no unit."""
    assert {"lock", "journal.json"}.isdisjoint(host.file("/var/lib/sglang-hs").listdir())
    assert host.run("systemctl list-units --all --plain --no-legend 'sglang-hs-*'").stdout == ""


def test_a_host_was_sent_its_own_rows_and_no_others(host: Host, folder: Path) -> None:
    """Less than the whole data set, which none has."""
    assert not host.file("/var/lib/data/data.jsonl").exists
    assert 0 < host.file("/var/lib/data/data.jsonl.rows.jsonl").size < 0.9 * (folder / "data.jsonl").stat().st_size


def test_every_row_is_there_once_with_its_own_tokens(folder: Path, catalogue: list[dict[str, Any]]) -> None:
    """The file of index i has the ids of row i, and the bytes that its host accepted."""
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert [one["idx"] for one in catalogue] == list(range(len(rows)))
    assert len({one["host"] for one in catalogue}) >= 2
    for one, row in zip(catalogue, rows, strict=True):
        path = folder / "all/hidden_states" / f"hs_{one['idx']}.safetensors"
        assert hashlib.sha256(path.read_bytes()).hexdigest() == one["sha256"]
        found = tensors(path)
        assert array("q", found["token_ids"]).tolist() == row["input_ids"]
        assert len(found["hidden_states"]) % len(row["input_ids"]) == 0


def test_a_sample_that_two_hosts_made_is_the_same_on_both(folder: Path, catalogue: list[dict[str, Any]]) -> None:
    """Engines of one release and one model: the lost host's samples are those that the others made in its place."""
    lost = cache() / "rig/hosts/sglang-fleet-3/root" / OUTPUT[1:] / "hidden_states"
    theirs = {int(path.stem[3:]): path for path in lost.glob("hs_*.safetensors")}
    twice = [one["idx"] for one in catalogue if one["host"] != "sglang-fleet-3" and one["idx"] in theirs]
    assert len(twice) >= 5
    for idx in twice:
        a = array("f", tensors(folder / "all/hidden_states" / f"hs_{idx}.safetensors")["hidden_states"])
        b = array("f", tensors(theirs[idx])["hidden_states"])
        assert len(a) == len(b)
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-3


def test_the_trainers_folder_is_made_from_all_of_it(folder: Path) -> None:
    """The exporter takes the joined folder as if one host had made it, and datasets' own format is written beside it."""
    python = cache() / "engine/venv/bin/python"
    words = [
        str(python),
        "-m",
        "sglang_hs_client",
        "export",
        "--output",
        str(folder / "all"),
        "--format",
        "native",
        "--json",
    ]
    env = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'module_utils'}:{ROOT / 'files/engine'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "all/state.json").is_file()
