"""The edit on changed real sources of other releases, run by the releases' own code (compat/), in the engine's Python."""

from __future__ import annotations

import subprocess
import sys

from local_host import CACHE, REPO, Host


def test_changed_sources_are_edited_right_or_refused(host: Host) -> None:
    # both Pythons are of one minor version: the engine's environment was made with this one
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    words = [str(CACHE / "engine/venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compat"]
    env = {**host.env, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=600)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
