"""How many hosts may leave production at once, and that none leaves after one that did not come back; every ansible-core decides on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "filter_plugins"))

from ansible.errors import AnsibleFilterError  # noqa: E402
from hs_fleet import at_once, may_leave, places  # noqa: E402

HOSTS = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("keep", "count", "away", "left"),
    [
        ("50%", 2, 0, 1),
        ("50%", 3, 0, 1),
        ("50%", 5, 0, 2),
        (2, 3, 0, 1),
        ("0%", 3, 0, 3),
        ("2", 5, 1, 2),
        ("40%", 5, 2, 1),
    ],
)
def test_as_many_leave_as_leave_enough_behind(keep: str | int, count: int, away: int, left: int) -> None:
    assert may_leave(keep, HOSTS[:count], HOSTS[:away]) == left


@pytest.mark.parametrize(
    ("keep", "away", "told"),
    [
        (5, 0, "none may leave"),
        ("50%", 2, "a, b serve nothing"),
        ("half", 0, "neither a number"),
        (-1, 0, "neither a number"),
        ("inf%", 0, "neither a number"),
    ],
)
def test_where_none_may_leave_it_is_said(keep: str | int, away: int, told: str) -> None:
    with pytest.raises(AnsibleFilterError, match=told):
        may_leave(keep, HOSTS, HOSTS[:away])


def test_open_runs_take_their_room_and_are_never_refused_themselves() -> None:
    assert may_leave(2, HOSTS, [], ["a"]) == 2
    assert may_leave(3, HOSTS, HOSTS[:1], ["b"]) == 0
    assert may_leave(4, HOSTS, HOSTS[:3], ["d"], leaves=False) == -3
    with pytest.raises(AnsibleFilterError, match="none may leave"):
        may_leave(4, HOSTS, HOSTS[:3], ["d"])


def test_without_a_wish_all_leave_and_what_one_host_knows_all_do() -> None:
    assert at_once(HOSTS, {}) == 0
    assert at_once(HOSTS, {"a": {}, "b": {"hs_out_at_once": "2"}}) == 2
    # a was lost in a round in which more might leave
    assert at_once(HOSTS, {"a": {"hs_out_at_once": 3}, "b": {"hs_out_at_once": 1}}) == 1
    assert at_once(HOSTS, {"b": {"hs_out_at_once": -1}}) == 1
    assert places(["a", "b"], {"a": {"hs_place_told": "/x"}, "b": {"hs_output_dir": "/y"}}) == {"a": "/x", "b": "/y"}


PLAY = """\
- hosts: sglang
  gather_facts: false
  tasks:
    - ansible.builtin.set_fact: {hs_takes_part: true, hs_came_back: false, hs_out_at_once: 2}
- hosts: sglang
  gather_facts: false
  serial: "{{ groups['sglang'] | hs_at_once(hostvars) }}"
  strategy: "{{ 'host_pinned' if groups['sglang'] | length > 1 else 'linear' }}"
  tasks:
    - ansible.builtin.import_role: {name: preflight, tasks_from: order}
    - ansible.builtin.debug: {msg: "leaves"}
    - ansible.builtin.fail: {msg: broken}
      when: inventory_hostname == broken
    - ansible.builtin.set_fact: {hs_came_back: true}
"""


@pytest.mark.parametrize(("broken", "leave"), [("none", "abcde"), ("b", "ab"), ("c", "abcd")])
def test_after_one_that_did_not_come_back_nobody_leaves(tmp_path: Path, broken: str, leave: str) -> None:
    (tmp_path / "play.yml").write_text(PLAY)
    hosts = {name: {"ansible_connection": "local"} for name in HOSTS}
    (tmp_path / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": hosts}}))
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }
    words = [str(Path(sys.executable).parent / "ansible-playbook"), str(tmp_path / "play.yml")]
    words += ["-i", str(tmp_path / "hosts.yml"), "-e", f"broken={broken}"]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    out = done.stdout + done.stderr
    left = "".join(name for name in HOSTS if f"ok: [{name}] =>" in out)
    assert (left, done.returncode) == (leave, 0 if broken == "none" else 2), out
    if broken != "none":
        assert f"{broken} did not come back into production, so" in out


LOOK = """\
- hosts: sglang
  gather_facts: false
  tasks:
    - ansible.builtin.fail: {msg: cannot be reached}
      when: standing == 'lost'
    - ansible.builtin.set_fact:
        hs_found:
          open_run: "{{ {'run_id': 'x'} if standing == 'open' else {} }}"
          view: {settings: {production_expected: "{{ 'stopped' if standing == 'down' else 'running' }}"}}
    - ansible.builtin.import_role: {name: fleet, tasks_from: divide}
- hosts: sglang
  gather_facts: false
  serial: "{{ groups['sglang'] | hs_at_once(hostvars) }}"
  strategy: "{{ 'host_pinned' if groups['sglang'] | length > 1 else 'linear' }}"
  tasks:
    - ansible.builtin.import_role: {name: preflight, tasks_from: order}
    - ansible.builtin.debug: {msg: "leaves with {{ ansible_play_batch | join(' ') }}"}
    - ansible.builtin.set_fact: {hs_came_back: true}
"""


@pytest.mark.parametrize(
    ("standing", "keep", "limit", "leave", "told"),
    [
        ("serves serves serves", "2", "", "a b c", ""),
        ("open serves serves", "2", "", "a b c", ""),  # first it, then the others
        ("serves serves open", "2", "", "", "c is out of production with an open run, and beside it a may not leave"),
        ("serves serves open", "2", "c", "c", ""),
        ("serves serves open", "1", "", "a b c", ""),
        ("serves serves down", "2", "", "c", "none may leave"),
        ("serves serves lost", "2", "", "", "none may leave"),
        ("serves serves serves", "2", "b", "", "a, c serve nothing now, or were not looked at"),
        ("serves serves serves", "0", "b", "b", ""),
    ],
)
def test_never_more_are_out_than_may_be(
    tmp_path: Path, standing: str, keep: str, limit: str, leave: str, told: str
) -> None:
    (tmp_path / "play.yml").write_text(LOOK)
    hosts = {
        name: {"ansible_connection": "local", "standing": word, "hs_keep_serving": keep}
        for name, word in zip("abc", standing.split(), strict=True)
    }
    (tmp_path / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": hosts}}))
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }
    words = [str(Path(sys.executable).parent / "ansible-playbook"), str(tmp_path / "play.yml")]
    words += ["-i", str(tmp_path / "hosts.yml"), *(["--limit", limit] if limit else [])]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    out = done.stdout + done.stderr
    left = [name for name in "abc" if f"ok: [{name}] =>" in out and "leaves with" in out]
    assert " ".join(left) == leave, out
    assert told in " ".join(out.split())
    if keep == "2":
        assert re.search(r"leaves with \w \w", out) is None, out


def test_a_data_set_is_sent_to_several_hosts_only_to_be_divided(tmp_path: Path) -> None:
    (tmp_path / "play.yml").write_text(LOOK)
    hosts = {name: {"ansible_connection": "local", "standing": "serves"} for name in "ab"}
    (tmp_path / "hosts.yml").write_text(json.dumps({"sglang": {"hosts": hosts}}))
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
        "ANSIBLE_STDOUT_CALLBACK": "default",
    }
    words = [str(Path(sys.executable).parent / "ansible-playbook"), str(tmp_path / "play.yml")]
    words += ["-i", str(tmp_path / "hosts.yml"), "-e", "hs_dataset_source=/data/set.jsonl"]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    out = done.stdout + done.stderr
    assert done.returncode == 2, out
    assert "is sent to 2 hosts, but hs_fleet is false" in " ".join(out.split())
    assert "leaves with" not in out


@pytest.mark.parametrize(
    ("to", "code"),
    [
        ("store:bucket/states", 2),
        ("store:bucket/{{ inventory_hostname }}", 0),
        ("/mnt/states", 0),
        ("", 0),
    ],
)
def test_two_hosts_never_move_to_one_remote(tmp_path: Path, to: str, code: int) -> None:
    tasks = "- hosts: sglang\n  gather_facts: false\n  tasks:\n    - ansible.builtin.import_role: {name: preflight, tasks_from: remote}\n"
    (tmp_path / "play.yml").write_text(tasks)
    group = {"hosts": {name: {"ansible_connection": "local"} for name in "ab"}, "vars": {"hs_move_to": to}}
    (tmp_path / "hosts.yml").write_text(json.dumps({"sglang": group}))
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
    }
    words = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        str(tmp_path / "play.yml"),
        "-i",
        str(tmp_path / "hosts.yml"),
    ]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    out = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, out
    if code:
        assert "a and b would move their samples to the same store:bucket/states" in out
        assert "hs_move_to: store:bucket/states/{{ inventory_hostname }}" in out


def test_the_inventory_of_three_hosts_asks_for_what_only_an_operator_knows(tmp_path: Path) -> None:
    env = {
        **os.environ,
        "HOME": str(tmp_path),
        "ANSIBLE_HOME": str(tmp_path),
        "ANSIBLE_CONFIG": str(REPO / "ansible.cfg"),
    }
    words = [str(Path(sys.executable).parent / "ansible-playbook"), "playbooks/plan.yml", "-i", "inventory/fleet"]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120)
    out = done.stdout + done.stderr
    assert done.returncode == 2, out
    for host in ("bw1", "bw2", "bw3"):
        assert f"ansible_host is not set for {host}" in out
    assert "inventory/fleet/group_vars/sglang/1_host.yml" in out
