"""Make a light private instance of the engine: its own `sglang`, everything else shared with the cache.

The instance is a virtual environment without pip. Its site-packages hold a real copy of the engine's `sglang`
package, so that an edit there never reaches the cache, and a `.pth` file that puts the cached site-packages
(torch, transformers, the metadata of sglang) behind it. Run this with the cached environment's Python.

The instance is complete or absent: it is built beside its place and renamed. One that was made from the same
engine is left as it is, edits included; one made from another engine is refused unless --replace is given.

With --release the `sglang` package and its metadata are those of a release that build_release.py fetched, and the packages
that it needs otherwise come before the cached ones.
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
from typing import Any

RECORD = "instance.json"
PACKAGE = "sglang"
STAMP = "pins.sha256"  # the role writes it last


def build(folder: Path, sources: list[Path], behind: list[str]) -> None:
    """Build the environment in an empty or absent folder.

    Args:
        folder: where the environment goes.
        sources: folders to copy for real into its site-packages.
        behind: folders of packages that come after them, in this order.
    """
    venv.EnvBuilder(with_pip=False, symlinks=True, clear=True).create(folder)
    own = folder / Path(sysconfig.get_path("purelib")).relative_to(Path(sys.prefix))
    for source in sources:
        shutil.copytree(source, own / source.name, symlinks=True)
    (own / "cached_engine.pth").write_text("".join(f"{place}\n" for place in behind), encoding="utf-8")


def check(folder: Path, package: str, wanted: str) -> None:
    """Ask the instance itself, in a fresh process, which package it imports.

    Raises:
        SystemExit: it finds another one than its own, or its version is not the one that is wanted.
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
    if not Path(origin).resolve().is_relative_to(folder.resolve()) or found != wanted:
        raise SystemExit(f"the instance in {folder} imports {origin} ({found}), not its own copy")


def main() -> int:
    """Make the instance unless it is there; print `changed` or `unchanged`."""
    parser = argparse.ArgumentParser(description="Make a private instance of the local engine.")
    parser.add_argument("folder", type=Path, help="folder of the instance")
    parser.add_argument("--release", type=Path, help="folder of another release, made by build_release.py")
    parser.add_argument("--replace", action="store_true", help="replace an instance of another engine, edits and all")
    parser.add_argument("--check", action="store_true", help="say what would happen, write nothing")
    args = parser.parse_args()

    place: Path = args.folder.absolute()
    site = Path(sysconfig.get_path("purelib"))
    if not (Path(sys.prefix) / STAMP).is_file():
        raise SystemExit(f"the cached engine in {sys.prefix} is not complete: run playbooks/local_engine.yml")
    made_from: dict[str, Any] = {"site": str(site), PACKAGE: version(PACKAGE)}
    sources, behind = [site / PACKAGE], [str(site)]
    if args.release:
        record = json.loads((args.release / "release.json").read_text(encoding="utf-8"))
        sources = [path for path in (args.release / "site").iterdir() if path.name.split("-")[0] == PACKAGE]
        behind = record["behind"]
        made_from = {"site": str(args.release / "site"), PACKAGE: record[PACKAGE]}
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
        build(new, sources, behind)
        check(new, PACKAGE, made_from[PACKAGE])
        (new / RECORD).write_text(json.dumps(made_from) + "\n", encoding="utf-8")
        if place.exists():
            shutil.rmtree(place)
        os.rename(new, place)
    print("changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
