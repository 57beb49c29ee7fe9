"""A real HTTP proxy on loopback before a real server, which may spoil an answer on its way back."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (number of the /generate request from 0, what was asked, status, what was answered) -> (status, bytes to send, bytes to announce)
Spoil = Callable[[int, dict[str, Any], int, bytes], tuple[int, bytes, int]]


def honest(number: int, asked: dict[str, Any], status: int, answer: bytes) -> tuple[int, bytes, int]:
    """The answer as it came."""
    return status, answer, len(answer)


def lying(**told: Any) -> Spoil:
    """The answer with other words in its meta_info; a callable gets what was asked."""

    def spoil(number: int, asked: dict[str, Any], status: int, answer: bytes) -> tuple[int, bytes, int]:
        document = json.loads(answer)
        for key, word in told.items():
            document["meta_info"][key] = word(asked) if callable(word) else word
        changed = json.dumps(document).encode()
        return status, changed, len(changed)

    return spoil


class Proxy:
    """Use as a context manager. ``spoil`` may be exchanged at any time; ``spoiled`` counts the answers that it changed."""

    def __init__(self, target: str, spoil: Spoil = honest) -> None:
        self.spoil = spoil
        self.spoiled = 0
        self._asked = 0
        self._lock = threading.Lock()
        host, port = urllib.parse.urlsplit(target).netloc.split(":")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                there = http.client.HTTPConnection(host, int(port), timeout=60)
                there.request("POST", self.path, body, {"Content-Type": "application/json"})
                response = there.getresponse()
                status, answer = response.status, response.read()
                there.close()
                sent, announced = answer, len(answer)
                if self.path == "/generate":
                    with proxy._lock:
                        number, proxy._asked = proxy._asked, proxy._asked + 1
                    status, sent, announced = proxy.spoil(number, json.loads(body), status, answer)
                    proxy.spoiled += sent != answer or announced != len(answer) or status != response.status
                self.send_response(status)
                self.send_header("Content-Length", str(announced))
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
