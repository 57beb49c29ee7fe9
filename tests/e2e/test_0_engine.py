"""What runs inside the engine's own Python: capture and client against real torch modules, run by the engine's interpreter."""

from __future__ import annotations

import subprocess
import sys

from local_host import CACHE, REPO, Host


def test_the_capture_and_the_client_in_the_engines_python(host: Host) -> None:
    # both Pythons are of one minor version: the engine's environment was made with this one
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    words = [str(CACHE / "engine/venv/bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/engine"]
    env = {**host.env, "PYTHONPATH": packages, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=900)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
