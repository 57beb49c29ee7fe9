"""A server of HAProxy, by its runtime socket: drained before a host leaves production, ready after it is back.

    python3 haproxy.py SOCKET BACKEND/SERVER drain|ready [--wait SECONDS]

SOCKET: a path, or HOST:PORT (``stats socket ipv4@...:9999 level admin``). A drain ends when no request of HAProxy's is at the server any
more, or fails after --wait seconds (60); then the server is ready again. A file of its own, so that it can be run wherever Python 3.8 is.
"""

from __future__ import annotations

import argparse
import csv
import io
import socket
import sys
import time
from typing import Dict, List, Optional

EVERY = 0.2  # seconds between two looks at a server that drains


class Refused(Exception):
    """HAProxy said no, or cannot be reached."""


def ask(where: str, command: str) -> str:
    """What HAProxy answers to one command. Raises Refused."""
    host, _, port = where.rpartition(":")
    try:
        if host and port.isdigit():
            talk = socket.create_connection((host, int(port)), timeout=10)
        else:
            talk = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            talk.settimeout(10)
            talk.connect(where)
        with talk:
            talk.sendall(command.encode() + b"\n")
            parts: List[bytes] = []
            while True:
                part = talk.recv(65536)
                if not part:
                    return b"".join(parts).decode()
                parts.append(part)
    except OSError as error:
        raise Refused("HAProxy at {} cannot be asked: {}".format(where, error)) from error


def set_state(where: str, server: str, state: str) -> None:
    """Give BACKEND/SERVER a state. Raises Refused with HAProxy's words."""
    said = ask(where, "set server {} state {}".format(server, state)).strip()
    if said:  # it says nothing where it did so
        raise Refused("HAProxy at {} did not set {} to {}: {}".format(where, server, state, said))


def look(where: str, server: str) -> Dict[str, str]:
    """The server's line of ``show stat``: status, scur (requests at it) and so on. Raises Refused where there is none."""
    backend, _, name = server.partition("/")
    text = ask(where, "show stat").lstrip("# ")
    for row in csv.DictReader(io.StringIO(text)):
        if (row["pxname"], row["svname"]) == (backend, name):
            return row
    raise Refused("HAProxy at {} has no server {}".format(where, server))


def drain(where: str, server: str, patience: float) -> None:
    """No new requests, and wait for those that are being answered. Raises Refused, with the server ready again, past ``patience`` seconds."""
    set_state(where, server, "drain")
    until = time.monotonic() + patience
    while int(look(where, server)["scur"] or 0):
        if time.monotonic() > until:
            set_state(where, server, "ready")
            raise Refused(
                "{} still answered {} requests after {:g} s; it is ready again".format(
                    server, look(where, server)["scur"], patience
                )
            )
        time.sleep(EVERY)


def main(arguments: Optional[List[str]] = None) -> int:
    """The command line: 0 done, 1 refused."""
    parser = argparse.ArgumentParser(prog="haproxy", description="Drain a server of HAProxy, or make it ready.")
    parser.add_argument("socket", help="path of the runtime socket, or HOST:PORT")
    parser.add_argument("server", help="BACKEND/SERVER")
    parser.add_argument("state", choices=["drain", "ready"])
    parser.add_argument("--wait", type=float, default=60.0, help="seconds that a drain may take")
    given = parser.parse_args(arguments)
    try:
        if given.state == "drain":
            drain(given.socket, given.server, given.wait)
        else:
            set_state(given.socket, given.server, "ready")
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    print("{} is {}".format(given.server, "drained" if given.state == "drain" else "ready"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
