"""kill -9 of the controller in the middle of an extraction, then nothing at all: what is seen from outside, second by second.

python -m tests.campaign.faults.recorded > docs/dead-controller.md
"""

from __future__ import annotations

import json
import os
import pwd
import re
import signal
import tempfile
import time
from pathlib import Path

from .cell import SETTINGS
from .host import OUTPUT, STATE, FaultHost

ROWS = 1000
HEAD = """# A dead controller, recorded

A real systemd host, a real SGLang server as production, `extract.yml` started over ssh. In the middle of the extraction the controller is
killed with SIGKILL, and nobody does anything any more. Seconds count from that moment; what changed is looked for twice a second,
past the network. (SGLang ends with a status of its own on SIGTERM, so a stopped production is `failed` to systemd.)
Made by tests/campaign/faults/recorded.py; nothing below is typed by hand.

| seconds | run's last record | production | extraction server | client | guard's timer | samples |
|---|---|---|---|---|---|---|
"""


def _line(host: FaultHost) -> list[str]:
    """How it stands now."""
    journal = host.journal()
    units = ("sglang.service", "sglang-hs-extraction.service", "sglang-hs-client.service", "sglang-hs-guard.timer")
    states = host.inside(f"systemctl show -p ActiveState --value {' '.join(units)} | grep .").split()
    if states[0] == "active":
        said = host.inside("/usr/local/bin/generate 30000 2>/dev/null || true")
        states[0] = "answers" if "output_ids" in said else "loads"
    last = journal["steps"][-1] if journal else None
    count = len(list(host.disk(OUTPUT).glob("hidden_states/hs_*.safetensors")))
    return [f"{last['step']} {last['state']}" if last else "(no run is open)", *states, str(count)]


def main() -> None:
    """Print the page."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    cache = Path(os.environ.get("HS_CACHE") or home / ".cache/sglang-hidden-states")
    with tempfile.TemporaryDirectory(prefix="hs-recorded-", dir="/tmp") as folder:
        host = FaultHost("hs-recorded", 69, Path(folder), cache)
        try:
            host.up()
            rows = [json.dumps({"input_ids": [7 + row % 500, 8 + row // 500, *range(9, 25)]}) for row in range(ROWS)]
            (host.tree / "root/var/tmp/rows.jsonl").write_text("\n".join(rows) + "\n")
            # the patience of the default: nothing is shortened here
            kept = {key: word for key, word in SETTINGS.items() if key != "hs_controller_patience"}
            playing = host.begin(
                "playbooks/extract.yml", "-e", json.dumps({**kept, "hs_dataset": "/var/tmp/rows.jsonl"})
            )
            while int(_line(host)[-1]) < ROWS // 5:
                if playing.poll() is not None:
                    raise SystemExit(host.log.read_text())
                time.sleep(0.2)
            before = _line(host)
            os.killpg(playing.pid, signal.SIGKILL)
            playing.wait()
            zero = time.monotonic()
            print(HEAD + f"| before | {' | '.join(before)} |")
            print("| 0 | SIGKILL to ansible-playbook and all its processes | | | | | |")
            said, told = before, 0.0
            while True:
                line = _line(host)
                now = time.monotonic() - zero
                if line[:-1] != said[:-1] or (line != said and now - told > 10):
                    print(f"| {now:.1f} | {' | '.join(line)} |", flush=True)
                    said, told = line, now
                if line[0].startswith("(") and line[1] == "answers":
                    break
                if now > 900:
                    raise SystemExit("production did not come back")
                time.sleep(0.5)
            closed = host.look(60)
            print(f"\nThe run was closed because: *{closed['closed']['why']}*. ", end="")
            print(
                f"Accepted samples: {closed['samples']['accepted']}, wrong ones: {len(closed['samples']['wrong'])}. ",
                end="",
            )
            looked_at = {
                "production": "production's argv and environment",
                "tree": "every file of the engine",
                "units": "the units",
            }
            same = [words for key, words in looked_at.items() if closed[key] == host.before[key]]
            print(f"As before the run: {', '.join(same) or 'nothing'}. ", end="")
            code, out = host.play("playbooks/restore.yml")
            recap = re.sub(r"\s+", " ", out.strip().splitlines()[-1])
            print(f"`restore.yml` afterwards, status {code}:\n\n```text\n{recap}\n```")
            print(f"\nIts journal, from `{STATE}/runs`:\n\n```text")
            runs = sorted(host.disk(STATE).glob("runs/*/journal.json"))
            steps = json.loads(runs[-1].read_text())["steps"]
            for record in steps:
                print(f"{record['at'] - steps[0]['at']:8.1f} s  {record['step']} {record['state']}")
            print("```")
        finally:
            host.down()


if __name__ == "__main__":
    main()
