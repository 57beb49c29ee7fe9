"""Calls the exporter in the engine's Python (torch is there), after the run: production serves again."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Dict, List

from . import fsio
from .errors import HsError
from .journal import Paths

UNTOUCHED = "everything: the captured samples were only read"


def interpreter(output: Path) -> str:
    """The Python that served the engine when ``output`` was made, out of its manifest.json."""
    document = fsio.read_json(output / "manifest.json")
    if document is None:
        raise HsError(
            "there is no finished extraction in {}: it has no manifest.json".format(output),
            UNTOUCHED,
            "run extract.yml first, or set hs_output_dir to the folder that it wrote",
        )
    return str(((document.get("provenance") or {}).get("engine") or {}).get("executable") or "")


def call(
    state_dir: str, output_dir: str, name: str, to: str, final: str = "", python: str = "", dry: bool = False
) -> Dict[str, Any]:
    """Export ``output_dir`` as ``name`` into ``to``; the exporter's result (see its export()), with ``line`` for a person.

    dry: only look. Raises HsError with the exporter's own message, and while a run is open: production comes first.
    """
    paths, output = Paths(state_dir), Path(output_dir)
    if paths.journal.exists():
        raise HsError(
            "a run is open on this host: production is not back yet",
            UNTOUCHED,
            "let it end (or run restore.yml), then export",
        )
    python = python or interpreter(output)
    if not python:
        raise HsError(
            "{}/manifest.json does not tell the engine's Python".format(output), UNTOUCHED, "set hs_engine_python"
        )
    if not (paths.lib / "sglang_hs_client" / "export.py").is_file():  # check mode on a host that has none yet
        return {"written": 1, "line": "would install the exporter and make {} in {}".format(name, to), "format": name}
    # production serves on the same cores and disks
    argv: List[str] = ["nice", "-n", "10", python, "-m", "sglang_hs_client", "export", "--json"]
    argv += ["--output", output_dir, "--format", name]
    argv += ["--to", to] if name != "native" else []
    argv += ["--final", final] if final else []
    argv += ["--dry-run"] if dry else []
    env = dict(os.environ, PYTHONPATH=str(paths.lib), CUDA_VISIBLE_DEVICES="", PYTHONDONTWRITEBYTECODE="1")
    try:
        done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    except OSError as error:
        raise HsError("{} cannot be started: {}".format(python, error), UNTOUCHED, "set hs_engine_python") from error
    if done.returncode != 0:
        told = [line for line in done.stderr.strip().splitlines() if line.strip()]
        # its own message is whole; a traceback ends with what happened
        text = "\n".join(told) if told and not told[0].startswith("Traceback") else (told or ["it said nothing"])[-1]
        raise HsError("the export to {} failed with status {}: {}".format(name, done.returncode, text))
    lines = done.stdout.strip().splitlines()
    result: Dict[str, Any] = json.loads(lines[-1])
    return dict(result, line=lines[-2])
