"""Clients without their imports: the engine's Python imports torch and the client once, then forks a client for each line it reads.

    ENGINE_PYTHON nursery.py          stdin: a JSON list [log file, word, ...]; stdout: the client's pid, then how it ended

One client at a time. It is the shipped program, called with the same words; what it saves a campaign is 1.5 s for each client.
"""

from __future__ import annotations

import json
import os
import sys

from sglang_hs_client.__main__ import main


def client(log: str, words: list[str]) -> int:
    """In the child: a session and a log of its own, then the client."""
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(fd, stream)
    return main(words)


for line in sys.stdin:
    log, *words = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = client(log, words)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
