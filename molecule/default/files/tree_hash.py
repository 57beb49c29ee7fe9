#!/usr/bin/env python3
"""Print one hash over the names, modes and contents of all files below the given folders, byte code aside."""

import hashlib
import os
import sys
from pathlib import Path


def tree_hash(folders: list[Path]) -> str:
    """Hash every file and link; the order is that of the paths."""
    digest = hashlib.sha256()
    for folder in folders:
        if not folder.is_dir():
            raise SystemExit(f"no such folder: {folder}")
        for path in sorted(folder.rglob("*")):
            if "__pycache__" in path.parts or (path.is_dir() and not path.is_symlink()):
                continue
            content = os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes()
            line = f"{path} {path.lstat().st_mode:o} {hashlib.sha256(content).hexdigest()}\n"
            digest.update(os.fsencode(line))
    return digest.hexdigest()


if __name__ == "__main__":
    print(tree_hash([Path(name) for name in sys.argv[1:]]))
