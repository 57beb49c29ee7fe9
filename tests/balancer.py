"""A real HAProxy before real servers, and whoever asks through it."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAM = shutil.which("haproxy") or "/usr/sbin/haproxy"
CONFIG = """\
global
    stats socket {socket} level admin
    stats socket ipv4@{address}:{admin} level admin
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    timeout check 30s
frontend models
    bind 127.0.0.1:{port}
    default_backend sglang
backend sglang
    option httpchk GET /health
    balance roundrobin
{servers}
"""


class HAProxy:
    """``servers``: name -> host:port. ``port``: of the frontend; ``admin``: the runtime socket's, over TCP at ``address``."""

    def __init__(
        self, folder: Path, servers: Mapping[str, str], port: int, admin: int, address: str = "127.0.0.1"
    ) -> None:
        self.socket, self.port, self.admin = folder / "admin.sock", port, f"{address}:{admin}"
        lines = "\n".join(f"    server {name} {where} check inter 500ms fall 20" for name, where in servers.items())
        self.config = folder / "haproxy.cfg"
        self.config.write_text(
            CONFIG.format(socket=self.socket, address=address, admin=admin, port=port, servers=lines)
        )
        self.process = subprocess.Popen(
            [PROGRAM, "-db", "-f", str(self.config)],
            stdout=(folder / "haproxy.log").open("wb"),
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + 20
        while not self.socket.exists():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "haproxy.log").read_text())
            time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait(20)


BODY = json.dumps({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})


def generates(address: str, port: int, patience: float) -> bool:
    """Whether a real generation comes back."""
    talk = http.client.HTTPConnection(address, port, timeout=patience)
    try:
        talk.request("POST", "/generate", BODY, {"Content-Type": "application/json"})
        answer = talk.getresponse()
        return answer.status == 200 and len(json.loads(answer.read())["output_ids"]) == 1
    except (OSError, ValueError, KeyError, http.client.HTTPException):
        return False
    finally:
        talk.close()


@dataclass(frozen=True)
class Tick:
    """One look: when it began (unix time), who answered."""

    at: float
    answers: frozenset[str]


class Prober:
    """Asks every place for a generation four times a second, all at once, until it is closed. ``places``: name -> (address, port)."""

    EVERY, PATIENCE = 0.25, 60.0

    def __init__(self, places: Mapping[str, tuple[str, int]]) -> None:
        self.places = dict(places)
        self.ticks: list[Tick] = []
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._looks: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(self.EVERY):
            look = threading.Thread(target=self._look, args=(time.time(),), daemon=True)
            look.start()
            self._looks = [one for one in self._looks if one.is_alive()] + [look]

    def _look(self, at: float) -> None:
        found: set[str] = set()

        def ask(name: str) -> None:
            if generates(*self.places[name], self.PATIENCE):
                found.add(name)

        asking = [threading.Thread(target=ask, args=(name,), daemon=True) for name in self.places]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        with self._lock:
            self.ticks.append(Tick(at, frozenset(found)))

    def close(self) -> list[Tick]:
        """Stop asking; every look, in order."""
        self._done.set()
        self._thread.join()
        for one in self._looks:
            one.join()
        return sorted(self.ticks, key=lambda tick: tick.at)
