"""The installed SGLang: where its package lies, which release it is, which options it knows - asked of itself, never assumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set

from .errors import HsError

MODEL_FILE = "srt/models/deepseek_v2.py"
REGISTRY_FILE = "srt/models/registry.py"

# Runs in the engine's interpreter; finds the package without importing it (an import takes seconds).
_PROBE = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec("sglang")
places = list(spec.submodule_search_locations or []) if spec else []
try:
    release = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    release = None
print(json.dumps({"python": sys.version.split()[0], "executable": sys.executable, "places": places, "release": release}))
"""


def interpreter(argv: Sequence[str], environment: Mapping[str, str], cwd: str) -> Optional[str]:
    """The Python of a server's command line, as an absolute path that keeps its virtual environment; None if not to be told."""
    if not argv:
        return None
    name = argv[0]
    if not re.search(r"python[0-9.]*$", name):
        # a console script (sglang serve): its first line names the interpreter
        try:
            with open(os.path.join(cwd, name), "rb") as handle:
                first = handle.readline(300).decode(errors="replace")
        except OSError:
            return None
        match = re.match(r"#!\s*(\S*python[0-9.]*)\s*$", first)
        return match.group(1) if match else None
    if "/" in name:
        return os.path.normpath(os.path.join(cwd, name))
    for folder in environment.get("PATH", os.defpath).split(":"):
        candidate = os.path.join(folder, name)
        if os.access(candidate, os.X_OK):
            return candidate
    return None


def describe(python: str, environment: Mapping[str, str], cwd: str) -> Dict[str, Any]:
    """The engine that ``python`` would run: {python, executable, package, release, model_file}.

    ``environment`` and ``cwd`` are production's: either may decide which package is found. Raises HsError with the reason.
    """
    untouched = "everything: production was not touched"
    if not (os.path.isfile(python) and os.access(python, os.X_OK)):
        raise HsError(
            "{} is not a Python interpreter on this host".format(python),
            untouched,
            "set hs_engine_python to the Python that runs SGLang, e.g. /opt/sglang/venv/bin/python",
        )
    try:
        done = subprocess.run(
            [python, "-c", _PROBE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            cwd=cwd,
            timeout=60,
            check=False,
        )
        found = json.loads(done.stdout.decode().strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise HsError(
            "{} does not work as a Python interpreter: {}".format(python, error),
            untouched,
            "set hs_engine_python to the Python that runs SGLang",
        ) from error
    if not found["places"]:
        raise HsError(
            "{} (Python {}) has no package sglang".format(python, found["python"]),
            untouched,
            "set hs_engine_python to the Python that runs SGLang: the first word of the server's command line",
        )
    package = Path(found["places"][0])
    model_file = package / MODEL_FILE
    if not model_file.is_file():
        raise HsError(
            "{} is missing: this SGLang serves no DeepSeek-family model".format(model_file),
            untouched,
            "check the installation, e.g. {} -m pip show -f sglang".format(python),
        )
    return {
        "python": found["python"],
        "executable": python,
        "package": str(package),
        # first what the engine will say of itself: a checkout that was pulled since it was installed has older metadata
        "release": _version_file(package) or found["release"] or "unknown",
        "model_file": str(model_file),
    }


def refuse_no_touch(installed: Mapping[str, Any]) -> None:
    """HsError where the release imports no package of ours: SGLANG_EXTERNAL_MODEL_PACKAGE came after 0.5.4.

    Such a release passes over the variable in silence; the extraction server would start without a capture.
    """
    try:
        text = (Path(installed["package"]) / REGISTRY_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if "SGLANG_EXTERNAL_MODEL_PACKAGE" not in text:
        raise HsError(
            "SGLang {} imports no package before it builds a model (SGLANG_EXTERNAL_MODEL_PACKAGE came after 0.5.4)".format(
                installed["release"]
            ),
            "everything: production was not touched",
            "leave hs_no_touch false: the edit of the engine's source serves this release",
        )


def _version_file(package: Path) -> str:
    """The release that the package names itself, ``sglang.__version__``; "" where only its metadata does."""
    for name in ("_version.py", "version.py"):
        with contextlib.suppress(OSError):
            text = (package / name).read_text(encoding="utf-8", errors="replace")
            match = re.search(r"""(?m)^__version__ = (?:version = )?["']([^"']+)["']""", text)
            if match:
                return match.group(1)
    return ""


class Flags:
    """The options that the installed release knows, asked of itself in the background: its help takes seconds to print.

    ``kept``: an answer of before, {key, names}; it counts while the engine's argument files are the same.
    """

    def __init__(
        self, installed: Mapping[str, Any], environment: Mapping[str, str], cwd: str, kept: Optional[Mapping[str, Any]]
    ) -> None:
        self.key = _arguments_key(installed)
        self._names: Optional[Set[str]] = set(kept["names"]) if kept and kept.get("key") == self.key else None
        self._process: Optional["subprocess.Popen[bytes]"] = None
        if self._names is None:
            quiet = dict(environment, COLUMNS="200", CUDA_VISIBLE_DEVICES="")  # the GPUs are production's
            command: List[str] = [installed["executable"], "-m", "sglang.launch_server", "--help"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=quiet, cwd=cwd
            )

    def result(self, patience: float = 180.0) -> Set[str]:
        """Option names. Raises HsError when the release does not print its help."""
        if self._process is not None:
            try:
                out, err = self._process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                out, err = self._process.communicate()
            self._names = _declared(out.decode(errors="replace"))
            if "--model-path" not in self._names:
                last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
                raise HsError(
                    "the installed SGLang does not print its options: {}".format(last[0]),
                    "everything: production was not touched",
                    "run `python -m sglang.launch_server --help` with production's Python and mend what it says",
                )
        return self._names or set()

    def drop(self) -> None:
        """The answer is not wanted any more."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _declared(text: str) -> Set[str]:
    """Options in a help text: from the lines that declare one, with all its names; prose mentions options that are gone."""
    lines = [line for line in text.splitlines() if line.startswith("  -")]
    return {name for line in lines for name in re.findall(r"(?:^  |, )(?:-\w, )?(--[a-z0-9-]+)", line)}


def _arguments_key(installed: Mapping[str, Any]) -> str:
    """Changes when the engine's options may have: its place, its release, the times of the files that declare them."""
    package = Path(installed["package"])
    files = [package / "srt/server_args.py", *sorted((package / "srt/arg_groups").rglob("*.py"))]
    times = ",".join(str(file.stat().st_mtime_ns) for file in files if file.is_file())
    return hashlib.sha256("{} {} {}".format(package, installed["release"], times).encode()).hexdigest()
