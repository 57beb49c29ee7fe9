"""Remotes for tests and measurements: rclone's own servers of SFTP, WebDAV and S3 on loopback, processes of their own with a folder each.

The program comes from PyPI in a wheel (tests/readers/rclone.txt) and lies in the cache that checkouts share.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
CACHE = Path(
    os.environ.get("HS_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-hidden-states"
)
KINDS = ("sftp", "webdav", "s3")
USER, KEY = "hsaccesskey", "hssecretkey123"


def program() -> Path:
    """The pinned rclone, installed on first use."""
    pins = REPO / "tests/readers/rclone.txt"
    place = CACHE / "readers" / f"rclone-{hashlib.sha256(pins.read_bytes()).hexdigest()[:12]}"
    binary = place / "bin/rclone"
    if not binary.is_file():
        part = place.with_name(f".{place.name}.{os.getpid()}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*words, "--no-input", "--target", str(part), "-r", str(pins)], check=True, timeout=300)
        (part / "bin/rclone").chmod(0o755)
        with contextlib.suppress(OSError):  # another one was faster
            part.rename(place)
        shutil.rmtree(part, ignore_errors=True)
    return binary


def free_port() -> int:
    """A port below those that the kernel gives to outgoing connections."""
    while True:
        port = random.randrange(10240, 32000)
        with socket.socket() as tried:
            with contextlib.suppress(OSError):
                tried.bind(("127.0.0.1", port))
                return port


class Far:
    """A server of ``kind`` over ``folder/far``, and the configuration that names it ``far``. Not running until :meth:`start`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind = kind
        self.root = folder / "far"  # what the server serves
        self.root.mkdir(parents=True)
        self.rclone = program()
        self.port = free_port()
        self.log = folder / "server.log"
        self.config = folder / "rclone.conf"
        self.process: subprocess.Popen[bytes] | None = None
        if kind == "s3":
            (self.root / "bucket").mkdir()
        self._configure()

    @property
    def to(self) -> str:
        """What hs_move_to names."""
        return "far:bucket/samples" if self.kind == "s3" else "far:samples"

    @property
    def place(self) -> Path:
        """Where what is moved lies on the server's disk."""
        return self.root / ("bucket/samples" if self.kind == "s3" else "samples")

    def _configure(self) -> None:
        done = subprocess.run([self.rclone, "obscure", KEY], capture_output=True, text=True, check=True)
        hidden = done.stdout.strip()
        lines = {
            "sftp": ["type = sftp", "host = 127.0.0.1", f"port = {self.port}", f"user = {USER}", f"pass = {hidden}",
                     "shell_type = unix"],
            "webdav": ["type = webdav", f"url = http://127.0.0.1:{self.port}", "vendor = other", f"user = {USER}", f"pass = {hidden}"],
            "s3": ["type = s3", "provider = Other", f"access_key_id = {USER}", f"secret_access_key = {KEY}",
                   f"endpoint = http://127.0.0.1:{self.port}", "force_path_style = true"],
        }[self.kind]  # fmt: skip
        self.config.write_text("\n".join(["[far]", *lines, ""]))
        self.config.chmod(0o600)

    def start(self, patience: float = 20) -> None:
        """Serve, and return when the port answers."""
        words = [
            str(self.rclone),
            "serve",
            self.kind,
            str(self.root),
            "--addr",
            f"127.0.0.1:{self.port}",
            "--config",
            "",
        ]
        words += ["--auth-key", f"{USER},{KEY}"] if self.kind == "s3" else ["--user", USER, "--pass", KEY]
        # the server of S3 would hand out an ETag that it remembers; with the others this makes every call slow
        words += ["--dir-cache-time", "0s"] if self.kind == "s3" else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + patience
        while time.monotonic() < until:
            with socket.socket() as tried, contextlib.suppress(OSError):
                tried.connect(("127.0.0.1", self.port))
                return
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        raise AssertionError(f"the server does not listen: {self.log.read_text()}")

    def kill(self) -> None:
        """SIGKILL, as a server that dies."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def move(self, **more: object) -> dict[str, object]:
        """The settings of a move to it."""
        return {"to": self.to, "rclone": str(self.rclone), "config": str(self.config), **more}

    @contextlib.contextmanager
    def serving(self) -> Iterator[Far]:
        """Running; killed on the way out."""
        self.start()
        try:
            yield self
        finally:
            self.kill()
