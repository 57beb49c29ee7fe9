"""How a failure reads: told once and as a message; with -v, and where it was not expected, in full."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.release import __version__

# from then on Ansible tells a failure twice, first with the place in the playbook
TELLS_TWICE = tuple(int(part) for part in __version__.split(".")[:2]) >= (2, 19)
REPO = Path(__file__).resolve().parents[2]
PLAYBOOK = str(Path(sys.executable).parent / "ansible-playbook")
TOLD = [
    "    run nothing is no longer open: it was restored or never begun",
    "    Left as it was: production, which is back; samples accepted so far are kept",
    "    Next: start playbooks/extract.yml again: it goes on where the run stopped",
]


def play(folder: Path, hosts: dict[str, Any], tasks: list[dict[str, Any]], *words: str) -> str:
    inventory, book = folder / "hosts.json", folder / "book.json"
    inventory.write_text(json.dumps({"all": {"hosts": hosts}}))
    book.write_text(json.dumps([{"name": "Failing", "hosts": "all", "gather_facts": False, "tasks": tasks}]))
    kept = {key: word for key, word in os.environ.items() if not key.startswith("ANSIBLE_")}
    env = {
        **kept,
        "HOME": str(folder),
        "ANSIBLE_HOME": str(folder),
        "ANSIBLE_REMOTE_TEMP": str(folder / "remote"),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
    }
    done = subprocess.run(
        [PLAYBOOK, str(book), "-i", str(inventory), *words],
        cwd=REPO,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode in (2, 4), done.stdout
    return done.stdout


LOCAL = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}


@pytest.mark.parametrize("verbose", [False, True])
def test_a_module_that_refuses_is_its_message_once_for_each_host(tmp_path: Path, verbose: bool) -> None:
    ask = {"name": "Ask", "hs_progress": {"state_dir": str(tmp_path / "state"), "run_id": "nothing", "what": "extract"}}
    out = play(tmp_path, {"gpu1": LOCAL, "gpu2": LOCAL}, [ask], *(["-v"] if verbose else []))
    if verbose:
        assert "[ERROR]: Task failed" in out or not TELLS_TWICE
        assert re.search(r"changed\W+false", out) and TOLD[1].strip() in out
        return
    lines = out.splitlines()
    for host in ("gpu1", "gpu2"):
        at = lines.index(f"fatal: [{host}]: FAILED! =>")
        assert lines[at + 1 : at + 4] == TOLD
    assert out.count("Left as it was") == 2 and "[ERROR]" not in out and "changed: false" not in out


def test_a_wrong_argument_an_unreachable_host_and_a_variable_that_is_not_there(tmp_path: Path) -> None:
    known = {"hs_run": {"run_id": "x"}, "hs_found": {"view": {}}}
    gone = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_ssh_retries": 0, **known}
    every = "{{ 'soon' if inventory_hostname == 'gpu1' else 30 }}"
    role = {
        "name": "Extract",
        "ansible.builtin.import_role": {"name": "run_extraction"},
        "vars": {"hs_log_every": every},
    }
    out = play(tmp_path, {"gpu1": LOCAL, "gpu2": LOCAL, "gone": gone}, [role])
    at = out.index("fatal: [gpu1]: FAILED! =>")
    wrong = out[at : out.index("\n\n", at)].splitlines()
    said = r"    argument 'hs_log_every' is of type (<class ')?str('>)? and we were unable to convert to int"
    assert len(wrong) == 3 and re.match(said, wrong[1])
    assert wrong[2].endswith("roles/run_extraction/defaults/main.yml says what it takes")
    assert "ok: [" not in out, "right arguments go without saying"
    # not this project's message: all that Ansible knows, with the place
    at = out.index("[ERROR]: Task failed" if TELLS_TWICE else "fatal: [gpu2]: FAILED!")
    assert "'hs_run' is undefined" in out[at:] and ("Origin: " if TELLS_TWICE else "The error appears") in out[at:]
    at = out.index("fatal: [gone]: UNREACHABLE! =>")
    lines = out[at:].splitlines()
    assert "127.0.0.1" in lines[1] and lines[2].startswith("    Left as it was: what runs on the host goes on there")
    assert lines[3].startswith("    Next: ")
