"""Fetch another release of SGLang, to be served by the packages of the environment that runs this program.

`FOLDER/site` gets the package `sglang` with its metadata, `FOLDER/release.json`, written last, says what is needed to run it:
`behind`, the folders of packages that come after it (for releases before 0.5.10.post1 first a small one with older pins, see
requirements-old.txt; then the environment's own), and `python_path`, the stand-ins. So a release costs what its own
sources take, not another 1.5 GB of torch.

Standard library only. The folder is complete or absent: it is built beside its place and renamed; so is
the folder of older pins.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from cache_lock import locked

RECORD = "release.json"
PINS = "pins.sha256"


def is_old(release: str) -> bool:
    """Tell whether the release needs the older packages and stand-ins: it is before 0.5.10.post1."""
    return [int(number) for number in re.findall(r"\d+", release)] < [0, 5, 10, 1]


def install(pip: list[str], words: list[str], place: Path) -> Path:
    """Install packages, without their dependencies, into a folder beside `place`; return that folder."""
    new = place.with_name(f".{place.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", *pip]
    # not compiled: most of it is never imported, and the rest is compiled by whoever imports it first
    command += ["--no-compile", "--no-deps", "--target", str(new)]
    subprocess.run([*command, *words], check=True, stdout=sys.stderr)
    return new


def put(new: Path, place: Path) -> None:
    """Move a finished folder to its place."""
    shutil.rmtree(place, ignore_errors=True)
    os.rename(new, place)


def prove(site: Path, record: dict[str, Any]) -> None:
    """Import the release's model code as a server would find it.

    Raises:
        subprocess.CalledProcessError: it does not import.
    """
    path = [*record["python_path"], str(site), *record["behind"]]
    names = "sglang.srt.server_args, sglang.srt.models.deepseek_v2"
    code = f"import {names}, sglang, os; assert sglang.__file__.startswith({str(site)!r}), sglang.__file__"
    quiet = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    env = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(path)}
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, check=True, stdout=sys.stderr)


def main() -> int:
    """Fetch the release unless it is there; print `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(description="Fetch another release of SGLang for the local engine.")
    parser.add_argument("folder", type=Path, help="folder of the release; its parent also gets the older packages")
    parser.add_argument("--sglang", required=True, help="the release")
    parser.add_argument("--old-pins", type=Path, required=True, help="packages that old releases need otherwise")
    parser.add_argument("--standins", type=Path, required=True, help="folder of the stand-ins")
    parser.add_argument("--old-standins", type=Path, required=True, help="folder that comes before it for old releases")
    parser.add_argument("--pip", action="append", default=[], help="a further argument of `pip install`")
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    args = parser.parse_args()

    folder: Path = args.folder.absolute()
    old = is_old(args.sglang)
    packages = folder.parent / "packages-old"
    pins = hashlib.sha256(args.old_pins.read_bytes()).hexdigest()
    record = {
        "sglang": args.sglang,
        "old": old,
        "behind": [*([str(packages)] if old else []), sysconfig.get_path("purelib")],
        "python_path": [*([str(args.old_standins)] if old else []), str(args.standins)],
    }

    def is_current() -> bool:
        try:
            complete = not old or (packages / PINS).read_text(encoding="utf-8").strip() == pins
            found: dict[str, Any] = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            return complete and found == record
        except (OSError, ValueError):
            return False

    if is_current() or args.check:
        print("unchanged" if is_current() else "changed")
        return 0
    with locked(folder.parent):
        if is_current():  # made while this one waited
            print("unchanged")
            return 0
        try:
            if old and not ((packages / PINS).is_file() and (packages / PINS).read_text("utf-8").strip() == pins):
                new = install(args.pip, ["--requirement", str(args.old_pins)], packages)
                (new / PINS).write_text(f"{pins}\n", encoding="utf-8")
                put(new, packages)
            site = install(args.pip, [f"sglang=={args.sglang}"], folder / "site")
            prove(site, record)
        except subprocess.CalledProcessError as error:
            print(f"failed: {error}; nothing of it is left in place, the next run starts it over", file=sys.stderr)
            return 1
        shutil.rmtree(folder / "site", ignore_errors=True)
        os.rename(site, folder / "site")
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
