"""What is kept of each release: the files of its wheel that are run, under ``$HS_CACHE/compat/wheels/<release>``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Dict, List, Sequence

from . import standins

DEEPSEEK = "sglang/srt/models/deepseek_v2.py"
STAMP = "kept.json"  # written last: name and sha256 of every file kept
DOWNLOADS = 4  # at once

# Wheels with compiled parts exist for few platforms. Nothing compiled is run here, so the platform is always this one.
PLATFORM = ["--implementation", "cp", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64"]


def cache() -> Path:
    """The folder that is shared between checkouts."""
    given = os.environ.get("HS_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(given) if given else Path(home) / "sglang-hidden-states"


def wanted(name: str) -> bool:
    """Whether a file of a wheel is kept: the model, and what standins.REAL names."""
    paths = [module.replace(".", "/") for module in standins.REAL]
    return name == DEEPSEEK or any(re.fullmatch(re.escape(path) + r"(/.*)?\.py", name) for path in paths)


def get(releases: Sequence[str]) -> Dict[str, Path]:
    """Release -> folder with its ``sglang``, downloaded where it is not kept yet. OSError names what cannot be had."""
    folders = {release: cache() / "compat" / "wheels" / release for release in releases}
    missing = [release for release in releases if not _whole(folders[release])]
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        failures = list(pool.map(lambda release: _fetch(release, folders[release]), missing))
    failed = [words for words in failures if words]
    if failed:
        raise OSError("\n".join(failed))
    return folders


def _sums(folder: Path) -> Dict[str, str]:
    files = (path for path in folder.rglob("*.py") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _whole(folder: Path) -> bool:
    """Whether the folder holds what its stamp says, and the stamp is of today's list."""
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == {"real": list(standins.REAL), "files": _sums(folder)})


def _fetch(release: str, folder: Path) -> str:
    """Keep what is wanted of one release; the wheel itself goes again. Returns why not, in words, or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        words: List[str] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        words += [*PLATFORM, "--dest", scratch, "sglang=={}".format(release)]
        done = subprocess.run(words, capture_output=True, text=True)
        found = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or len(found) != 1:
            return "sglang {} cannot be downloaded: {}".format(release, done.stderr.strip()[-300:])
        kept = Path(scratch) / "kept"
        kept.mkdir(mode=0o755)
        with zipfile.ZipFile(found[0]) as wheel:
            wheel.extractall(kept, [name for name in wheel.namelist() if wanted(name)])
        if not (kept / DEEPSEEK).is_file():
            return "sglang {} has no {}".format(release, DEEPSEEK)
        (kept / STAMP).write_text(json.dumps({"real": list(standins.REAL), "files": _sums(kept)}))
        shutil.rmtree(folder, ignore_errors=True)
        kept.rename(folder)
    return ""
