"""The file of vLLM's hidden-states connector, out of the wheel on PyPI, without vLLM: its writer and its reader, run as they are.

Nothing of it is part of this project: the file is fetched into the cache when it is first measured. The names of vLLM that it imports are
stand-ins whose use raises; what is run touches none of them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path
from typing import Any

RELEASE = "0.33.0"
FILE = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
PLATFORM = ["--implementation", "cp", "--python-version", "3.11", "--platform", "manylinux_2_28_x86_64"]


def fetched(cache: Path) -> Path:
    """The connector's file in the cache."""
    place = cache / "bench" / f"vllm-{RELEASE}" / Path(FILE).name
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            words = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
                *PLATFORM,
            ]
            subprocess.run([*words, "--dest", scratch, f"vllm=={RELEASE}"], check=True, stdout=subprocess.DEVNULL)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                part = Path(scratch) / "part"
                part.write_bytes(archive.read(FILE))
            part.rename(place)
    return place


class Absent(types.ModuleType):
    """A module of vLLM that is not there: its names can be imported, inherited from, and not used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "init_logger":
            return lambda _: None
        return type(name, (), {})


def load(cache: Path) -> Any:
    """The connector's module."""
    path = fetched(cache)
    names = {line.split()[1] for line in path.read_text().splitlines() if line.startswith("from vllm")}
    for name in names:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), Absent(".".join(parts[:end])))
    spec = importlib.util.spec_from_file_location("vllm_connector_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
