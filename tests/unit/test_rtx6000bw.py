"""The real host, which no machine here is: the exact extraction command, environment and units that it would get, compared whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from sglang_hs import command, preflight, restore

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
FILLED = {
    "ansible_host": "192.0.2.10",
    "hs_dataset": "/data/prompts.jsonl",
    "hs_output_dir": "/data/hidden-states",
    "hs_model_path": "/models/Kimi-K2.5-INT4",
}

COMMAND = """
/usr/bin/python3 -m sglang.launch_server --model-path /models/Kimi-K2.5-INT4 --tp-size 8 --trust-remote-code
--host 127.0.0.1 --port 31000 --attention-backend triton --max-running-requests 1 --disable-radix-cache
--chunked-prefill-size -1 --disable-cuda-graph --disable-prefill-cuda-graph
"""

ENVIRONMENT = {
    "NCCL_PROTO": "LL",
    "NCCL_ALGO": "Ring",
    "PYTHONPATH": "/var/lib/sglang-hs/lib",
    "SGLANG_HS_BOUNDARIES": "3,31,59",
    "SGLANG_HS_DUMP_DIR": "/dev/shm/sglang_hs",
    "SGLANG_HS_FINAL": "pre_norm",
}

EXTRACTION_UNIT = """\
# Run 20260101-000000-abcd: SGLang as the source of hidden states. Gone after the run, and after a reboot.
[Unit]
Description=SGLang handing over hidden states (run 20260101-000000-abcd)
# started by hand, production wins
Conflicts=sglang.service
After=sglang.service
OnSuccess=sglang-hs-guard.service
OnFailure=sglang-hs-guard.service

[Service]
Type=exec
User=root
WorkingDirectory=/root/sglang
# production's own environment and the lines below, 0600: it may hold secrets
EnvironmentFile=/var/lib/sglang-hs/runs/20260101-000000-abcd/server.env
Environment="NCCL_ALGO=Ring"
Environment="NCCL_PROTO=LL"
Environment="PYTHONPATH=/var/lib/sglang-hs/lib"
Environment="SGLANG_HS_BOUNDARIES=3,31,59"
Environment="SGLANG_HS_DUMP_DIR=/dev/shm/sglang_hs"
Environment="SGLANG_HS_FINAL=pre_norm"
ExecStart="/usr/bin/python3" "-m" "sglang.launch_server" "--model-path" "/models/Kimi-K2.5-INT4" "--tp-size" "8" \
"--trust-remote-code" "--host" "127.0.0.1" "--port" "31000" "--attention-backend" "triton" "--max-running-requests" "1" \
"--disable-radix-cache" "--chunked-prefill-size" "-1" "--disable-cuda-graph" "--disable-prefill-cuda-graph"
StandardOutput=append:/var/lib/sglang-hs/runs/20260101-000000-abcd/server.log
StandardError=inherit
# SIGTERM to the main process alone, SIGKILL to what is left in its own cgroup. A moment is enough: nobody but the client asks this server,
# and SGLang looks for a SIGTERM only every five seconds, to end its own processes with SIGKILL then.
KillMode=mixed
TimeoutStopSec=0.2
RuntimeMaxSec=21600
LimitNOFILE=1048576
LimitMEMLOCK=infinity
OOMPolicy=stop
Restart=no
"""

CLIENT_UNIT = """\
# Run 20260101-000000-abcd: the client that pushes the data set through. Gone after the run, and after a reboot.
[Unit]
Description=Extraction of hidden states (run 20260101-000000-abcd)
OnSuccess=sglang-hs-guard.service
OnFailure=sglang-hs-guard.service

[Service]
Type=exec
WorkingDirectory=/var/lib/sglang-hs/runs/20260101-000000-abcd
EnvironmentFile=/var/lib/sglang-hs/runs/20260101-000000-abcd/client.env
ExecStart="/usr/bin/python3" "-m" "sglang_hs_client" "run" "--spec" "/var/lib/sglang-hs/runs/20260101-000000-abcd/client.spec.json"
StandardOutput=append:/var/lib/sglang-hs/runs/20260101-000000-abcd/client.log
StandardError=inherit
TimeoutStopSec=120
RuntimeMaxSec=21600
Restart=no
"""

PLAY: list[dict[str, Any]] = [
    {
        "hosts": "sglang",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [f"{REPO}/roles/preflight/defaults/main.yml", f"{REPO}/roles/preflight/vars/main.yml"],
        "tasks": [
            {
                "name": "Wishes",
                "ansible.builtin.copy": {
                    "content": "{{ hs_wanted | to_json }}",
                    "dest": "{{ out }}/wanted.json",
                    "mode": "0600",
                },
            },
            {
                "name": "Units",
                "ansible.builtin.template": {
                    "src": f"{REPO}/templates/{{{{ item }}}}.j2",
                    "dest": "{{ out }}/{{ item }}",
                    "mode": "0600",
                },
                "loop": ["sglang-hs-extraction.service", "sglang-hs-client.service"],
                "when": "hs_found is defined",
            },
        ],
    }
]


def play(out: Path, extra: dict[str, Any]) -> None:
    """Run PLAY for the inventory's host, without asking it anything. vars_files weigh more than the inventory: so -e repeats it."""
    book = out / "play.yml"
    book.write_text(yaml.safe_dump(PLAY))
    inventory = yaml.safe_load((REPO / "inventory/rtx6000bw/group_vars/sglang.yml").read_text())
    given = {**inventory, **FILLED, "out": str(out), "ansible_python_interpreter": sys.executable, **extra}
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_HOME": str(out / "ansible"),
        "ANSIBLE_REMOTE_TEMP": str(out / "remote"),
        "HOME": str(out),
    }
    words = [str(BIN / "ansible-playbook"), str(book), "-i", str(REPO / "inventory/rtx6000bw"), "-e", json.dumps(given)]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rtx6000bw")
    play(out, {})
    wanted = json.loads((out / "wanted.json").read_text())
    settings = {**preflight.normalise(wanted), "engine_python": "/usr/bin/python3"}
    argv = ["/usr/bin/python3", *settings["production_argv"][1:]]
    flags = {
        "--disable-cuda-graph",
        "--disable-prefill-cuda-graph",
        "--disable-radix-cache",
        "--chunked-prefill-size",
        "--max-running-requests",
    }
    settings["command"] = command.extraction(argv, flags, settings["extraction_port"], settings["attention_backend"])
    view = {
        "settings": settings,
        "command": settings["command"],
        "environment": command.environment(settings, "/var/lib/sglang-hs/lib", {}),
        "unit": "sglang.service",
        "user": "root",
        "cwd": "/root/sglang",
    }
    (out / "view.json").write_text(json.dumps(view))
    play(out, {"hs_found": {"view": view}, "hs_run_id": "20260101-000000-abcd"})
    return out


def test_the_extraction_unit_and_the_restore_program_leave_its_server_the_same_time() -> None:
    (line,) = [line for line in EXTRACTION_UNIT.splitlines() if line.startswith("TimeoutStopSec=")]
    assert float(line.partition("=")[2]) == restore.SERVER_GRACE


def test_the_command_is_productions_without_what_spoils_and_with_what_is_needed(rendered: Path) -> None:
    assert json.loads((rendered / "view.json").read_text())["command"] == COMMAND.split()


def test_the_environment(rendered: Path) -> None:
    assert json.loads((rendered / "view.json").read_text())["environment"] == ENVIRONMENT


@pytest.mark.parametrize(
    ("unit", "text"), [("sglang-hs-extraction.service", EXTRACTION_UNIT), ("sglang-hs-client.service", CLIENT_UNIT)]
)
def test_the_units(rendered: Path, unit: str, text: str) -> None:
    assert (rendered / unit).read_text() == text


def test_systemd_itself_takes_the_units(rendered: Path) -> None:
    """systemd-analyze verify, where this machine has it; commands that are not here are all that it may miss."""
    try:
        done = subprocess.run(
            ["systemd-analyze", "verify", str(rendered / "sglang-hs-client.service")],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except FileNotFoundError:
        pytest.skip("systemd-analyze is not installed")
    wrong = [
        line for line in done.stderr.splitlines() if "Unknown" in line or "Invalid" in line or "Failed to parse" in line
    ]
    assert wrong == []
