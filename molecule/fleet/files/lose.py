"""Lose a host in the middle: once FOLDER has COUNT samples, everything on it stops and its link goes. ``lose.py NAME FOLDER COUNT``."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 500.0


def main() -> int:
    """Wait for the samples, then pause the host."""
    name, folder, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    until = time.monotonic() + PATIENCE
    while len(list(folder.glob("hs_*.safetensors"))) < count:
        if time.monotonic() > until:
            print(f"no {count} samples in {folder} after {PATIENCE:.0f} s", file=sys.stderr)
            return 1
        time.sleep(0.02)
    rig = Path(__file__).resolve().parents[2] / "rig/rig.py"
    return subprocess.run([sys.executable, str(rig), "pause", name], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
