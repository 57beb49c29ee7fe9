"""Build the virtual environment of the local engine.

Standard library only: it runs under the Python that the environment is made with. A stamp inside the environment,
written last, holds the checksum of its pins. No stamp, another one, or an interpreter that no longer starts: the
environment is removed and built anew. So an interrupted build is repaired by the next one, and two builds at once
wait for each other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from cache_lock import locked

STAMP = "pins.sha256"


def is_current(folder: Path, pins: str) -> bool:
    """Tell whether the environment is complete, has these pins and starts."""
    try:
        if (folder / STAMP).read_text(encoding="utf-8").strip() != pins:
            return False
        return subprocess.run([str(folder / "bin" / "python"), "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def build(folder: Path, requirements: Path, torch: str, sglang: str, options: list[str], standins: Path) -> None:
    """Install torch with its own dependencies, then all else without, and import the engine's model code.

    Args:
        folder: the environment; must not exist.
        requirements: pins of all packages but torch and sglang.
        torch: release of torch.
        sglang: release of SGLang.
        options: further arguments of `pip install`.
        standins: folder of the import-only stand-ins.
    """
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *options]
    code = "import sgl_cpu_ext, sglang.srt.server_args, sglang.srt.models.deepseek_v2"
    offline = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    for command, extra in (
        ([sys.executable, "-m", "venv", str(folder)], {}),
        ([*pip, f"torch=={torch}"], {}),
        ([*pip, "--no-deps", "--requirement", str(requirements)], {}),
        ([*pip, "--no-deps", f"sglang=={sglang}"], {}),
        ([python, "-W", "ignore", "-c", code], {**offline, "PYTHONPATH": str(standins)}),
    ):
        subprocess.run(command, check=True, env=os.environ | extra, stdout=sys.stderr)


def main() -> int:
    """Build the environment unless it is there; print `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(description="Build the virtual environment of the local engine.")
    parser.add_argument("folder", type=Path, help="folder of the environment")
    parser.add_argument("--requirements", type=Path, required=True, help="pins of all but torch and sglang")
    parser.add_argument("--torch", required=True, help="release of torch")
    parser.add_argument("--sglang", required=True, help="release of SGLang")
    parser.add_argument("--pip", action="append", default=[], help="a further argument of `pip install`")
    parser.add_argument("--standins", type=Path, required=True, help="folder of the stand-ins")
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    args = parser.parse_args()

    folder: Path = args.folder.absolute()
    sources = [args.torch, args.sglang, args.requirements.read_text(encoding="utf-8")]
    pins = hashlib.sha256(json.dumps(sources).encode()).hexdigest()
    if args.check:
        print("unchanged" if is_current(folder, pins) else "changed")
        return 0
    with locked(folder.parent):
        if is_current(folder, pins):
            print("unchanged")
            return 0
        shutil.rmtree(folder, ignore_errors=True)
        try:
            build(folder, args.requirements, args.torch, args.sglang, args.pip, args.standins)
        except subprocess.CalledProcessError as error:
            print(f"failed: {error}; the environment is incomplete, the next run starts it over", file=sys.stderr)
            return 1
        (folder / STAMP).write_text(f"{pins}\n", encoding="utf-8")
    print("changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
