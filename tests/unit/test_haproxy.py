"""A real HAProxy before real HTTP servers: drained, it sends nothing more and is waited for; ready, it sends again."""

from __future__ import annotations

import http.client
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from sglang_hs import haproxy  # noqa: E402

from tests.balancer import PROGRAM, HAProxy  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason="haproxy is not installed")
TOOL = ROOT / "module_utils/sglang_hs/haproxy.py"


class Server:
    """Answers with its name; a path that says /slow takes until it is let go."""

    def __init__(self, name: str) -> None:
        self.go, self.slow = threading.Event(), threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                if handler.path == "/slow":
                    self.slow.set()
                    self.go.wait(20)
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(name)))
                handler.end_headers()
                handler.wfile.write(name.encode())

            def log_message(handler, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.where = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


def free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def servers() -> dict[str, Server]:
    return {name: Server(name) for name in ("a", "b")}


@pytest.fixture
def balancer(tmp_path: Path, servers: dict[str, Server]) -> Iterator[HAProxy]:
    found = HAProxy(tmp_path, {name: one.where for name, one in servers.items()}, free(), free())
    until = time.monotonic() + 20
    while any(haproxy.look(str(found.socket), f"sglang/{name}")["check_status"] != "L7OK" for name in servers):
        assert time.monotonic() < until
        time.sleep(0.1)
    yield found
    found.close()
    for one in servers.values():
        one.server.shutdown()


def asked(port: int, path: str = "/") -> str:
    talk = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    talk.request("GET", path)
    text = talk.getresponse().read().decode()
    talk.close()
    return text


def tool(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *map(str, words)], capture_output=True, text=True, timeout=60)


def test_drained_it_is_asked_nothing_and_ready_it_is_asked_again(balancer: HAProxy) -> None:
    assert {asked(balancer.port) for _ in range(4)} == {"a", "b"}
    done = tool(balancer.socket, "sglang/a", "drain")
    assert (done.returncode, done.stdout) == (0, "sglang/a is drained\n"), done.stderr
    assert {asked(balancer.port) for _ in range(6)} == {"b"}
    assert tool(balancer.admin, "sglang/a", "ready").returncode == 0  # the same over TCP
    assert {asked(balancer.port) for _ in range(4)} == {"a", "b"}


def test_a_drain_waits_for_what_is_being_answered(balancer: HAProxy, servers: dict[str, Server]) -> None:
    haproxy.set_state(str(balancer.socket), "sglang/b", "drain")
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(asked(balancer.port, "/slow")))
    asking.start()
    assert servers["a"].slow.wait(20)
    done = tool(balancer.socket, "sglang/a", "drain", "--wait", "1")
    assert done.returncode == 1
    assert "still answered 1 requests" in done.stderr
    assert haproxy.look(str(balancer.socket), "sglang/a")["status"] == "UP"
    threading.Timer(1, servers["a"].go.set).start()
    assert tool(balancer.socket, "sglang/a", "drain").returncode == 0
    asking.join()
    assert answers == ["a"]


def test_a_server_that_is_not_there_and_a_haproxy_that_is_not(balancer: HAProxy, tmp_path: Path) -> None:
    done = tool(balancer.socket, "sglang/nobody", "drain")
    assert done.returncode == 1
    assert "No such server" in done.stderr
    assert "cannot be asked" in tool(tmp_path / "none", "sglang/a", "ready").stderr
