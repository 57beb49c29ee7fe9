"""How a window is written, and what a cut run's exit status is made of."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from sglang_hs import preflight
from sglang_hs.errors import HsError

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("text", "seconds"), [("6h", 21600), ("1h30m", 5400), ("45s", 45), ("90", 90)])
def test_a_length_of_time(text: str, seconds: float) -> None:
    assert preflight.seconds(text) == seconds


@pytest.mark.parametrize("text", ["until 25:00", "until 6", "06:30", "0", "", "soon", "until 06:60"])
def test_what_is_neither_a_length_nor_a_clock_time(text: str) -> None:
    with pytest.raises(HsError, match="no length of time"):
        preflight.seconds(text)


def test_a_clock_time_is_the_next_one_of_the_host_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        noon = time.mktime((2026, 11, 30, 12, 0, 0, 0, 0, -1))
        assert preflight._until(18, 30, noon) == 6.5 * 3600
        assert preflight._until(6, 30, noon) == 18.5 * 3600
        assert preflight._until(12, 0, noon) == 24 * 3600
        before_the_clocks_change = time.mktime((2026, 10, 24, 12, 0, 0, 0, 0, -1))
        assert preflight._until(6, 0, before_the_clocks_change) == 19 * 3600
    finally:
        monkeypatch.undo()
        time.tzset()


PLAY = """
- hosts: all
  gather_facts: false
  tasks:
    - hs_fail:
        msg: cut
        exit_status: "{{ wanted }}"
      when: wanted is defined
    - ansible.builtin.fail:
      when: broken is defined
"""


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ("a wanted=75\nb wanted=75", 75),
        ("a wanted=75\nb", 75),
        ("a wanted=75\nb broken=1", 2),
        ("a wanted=75\nb wanted=3", 2),
        ("a wanted=0", 2),
        ("a broken=1", 2),
        ("a", 0),
    ],
)
def test_the_exit_status_is_the_one_that_all_failed_hosts_ask_for(tmp_path: Path, hosts: str, status: int) -> None:
    (tmp_path / "play.yml").write_text(PLAY)
    lines = [f"{line} ansible_connection=local" for line in hosts.split("\n")]
    (tmp_path / "hosts").write_text("\n".join(lines) + "\n")
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_REMOTE_TEMP": str(tmp_path / "remote"),
    }
    words = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        str(tmp_path / "play.yml"),
        "-i",
        str(tmp_path / "hosts"),
    ]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == status, done.stdout + done.stderr
    assert "PLAY RECAP" in done.stdout
