"""Make a light private instance of the engine: its own `sglang`, everything else shared with the cache.

The instance is a virtual environment without pip. Its site-packages hold a real copy of the engine's `sglang`
package, so that an edit there never reaches the cache, and a `.pth` file that puts the cached site-packages
(torch, transformers, the metadata of sglang) behind it. Run this with the cached environment's Python.

The instance is complete or absent: it is built beside its place and renamed. One that was made from the same
engine is left as it is, edits included; one made from another engine is refused unless --replace is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

RECORD = "instance.json"
PACKAGE = "sglang"
STAMP = "pins.sha256"  # the role writes it last


def build(folder: Path, site: Path, package: str) -> None:
    """Build the environment in an empty or absent folder.

    Args:
        folder: where the environment goes.
        site: site-packages of the cached environment.
        package: name of the package to copy for real.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(folder)
    own = folder / site.relative_to(Path(sys.prefix))
    shutil.copytree(site / package, own / package, symlinks=True)
    (own / "cached_engine.pth").write_text(f"{site}\n", encoding="utf-8")


def check(folder: Path, package: str) -> None:
    """Ask the instance itself, in a fresh process, which package it imports.

    Raises:
        SystemExit: it finds another one than its own, or its version is not the cached one's.
    """
    code = (
        "import importlib.util, importlib.metadata, json; "
        f"print(json.dumps([importlib.util.find_spec('{package}').origin, importlib.metadata.version('{package}')]))"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    answer = subprocess.run(
        [str(folder / "bin" / "python"), "-c", code], env=env, check=True, capture_output=True, text=True
    )
    origin, found = json.loads(answer.stdout)
    if not Path(origin).resolve().is_relative_to(folder.resolve()) or found != version(package):
        raise SystemExit(f"the instance in {folder} imports {origin} ({found}), not its own copy")


def main() -> int:
    """Make the instance unless it is there; print `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(description="Make a private instance of the local engine.")
    parser.add_argument("folder", type=Path, help="folder of the instance")
    parser.add_argument("--replace", action="store_true", help="replace an instance of another engine, edits and all")
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    args = parser.parse_args()

    place: Path = args.folder.absolute()
    site = Path(sysconfig.get_path("purelib"))
    if not (Path(sys.prefix) / STAMP).is_file():
        raise SystemExit(f"the cached engine in {sys.prefix} is not complete: run playbooks/local_engine.yml")
    made_from = {"site": str(site), PACKAGE: version(PACKAGE)}
    if place.exists():
        try:
            current = json.loads((place / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise SystemExit(f"{place} exists and is no instance of the local engine: left as it is") from None
        if made_from.items() <= current.items():
            print("unchanged")
            return 0
        if not args.replace:
            raise SystemExit(
                f"{place} was made from another engine ({current}), may hold edits and is left as it is: "
                "remove it, or ask for its replacement"
            )
    if not args.check:
        new = place.with_name(f".{place.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.parent.mkdir(parents=True, exist_ok=True)
        build(new, site, PACKAGE)
        check(new, PACKAGE)
        (new / RECORD).write_text(json.dumps(made_from) + "\n", encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        os.rename(new, place)
    print("changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
