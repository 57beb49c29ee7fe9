#!/usr/bin/env python3
"""Ask the server on a port of this host for a real generation and print its answer.

generate PORT                    ask once
generate PORT UNIT SECONDS       ask until it answers; give up at once when the unit failed or was started again
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request

BODY = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}


def generate(port: str) -> dict[str, object]:
    """Send one request."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(BODY).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    if not isinstance(answer, dict) or not answer.get("output_ids"):
        raise ValueError(f"no generation in the answer: {answer}")
    return answer


def unit_is_well(unit: str) -> bool:
    """Tell whether the unit's first start still goes on or went well."""
    argv = ["systemctl", "show", "--property=ActiveState,NRestarts", unit]
    shown = dict(line.split("=", 1) for line in subprocess.check_output(argv, text=True).splitlines())
    return shown["ActiveState"] in ("active", "activating") and shown["NRestarts"] == "0"


def main() -> int:
    """Ask once, or until it answers."""
    port = sys.argv[1]
    if len(sys.argv) == 2:
        print(json.dumps(generate(port)))
        return 0
    unit, deadline = sys.argv[2], time.monotonic() + float(sys.argv[3])
    while True:
        try:
            print(json.dumps(generate(port)))
        except (OSError, ValueError) as error:
            if not unit_is_well(unit):
                print(f"{unit} failed to start", file=sys.stderr)
                return 1
            if time.monotonic() > deadline:
                print(f"no answer in time: {error}", file=sys.stderr)
                return 1
            time.sleep(0.5)
        else:
            return 0


if __name__ == "__main__":
    sys.exit(main())
