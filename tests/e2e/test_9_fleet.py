"""Three real hosts behind a real HAProxy: they leave production one at a time, and whoever asks never finds fewer than two of them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from local_host import CACHE, REPO

sys.path.insert(0, str(REPO))

from tests.balancer import HAProxy, Prober
from tests.fleet_rig import OUTPUT, PORT, RIG, FleetRig

pytestmark = pytest.mark.long
NAMES = {"hs-fleet-1": 74, "hs-fleet-2": 75, "hs-fleet-3": 76}
TOOL = str(REPO / "module_utils/sglang_hs/haproxy.py")


def free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def fleet() -> Iterator[FleetRig]:
    able = subprocess.run([sys.executable, str(RIG), "check"], capture_output=True, text=True)
    if able.returncode == 3:
        pytest.skip(f"no systemd host can be booted here: {(able.stdout + able.stderr).strip()}")
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        made = FleetRig(NAMES, Path(folder), CACHE)
        try:
            made.up(rows=30)
            yield made
        finally:
            made.down()


@pytest.fixture(scope="module")
def balancer(fleet: FleetRig) -> Iterator[HAProxy]:
    gateway = fleet.addresses["hs-fleet-1"].rsplit(".", 1)[0] + ".1"
    servers = {name: f"{address}:{PORT}" for name, address in fleet.addresses.items()}
    made = HAProxy(fleet.folder, servers, free(), free(), gateway)
    yield made
    made.close()


def hooks(balancer: HAProxy, back_on: str = "controller") -> dict[str, Any]:
    server = "sglang/{{ inventory_hostname }}"
    after = [sys.executable, TOOL, str(balancer.socket), server, "ready"]
    if back_on == "host":
        after = ["python3", "/var/lib/sglang-hs/lib/sglang_hs/haproxy.py", balancer.admin, server, "ready"]
    return {
        "hs_before_leaving": {"command": [sys.executable, TOOL, str(balancer.socket), server, "drain"]},
        "hs_after_returning": {"command": after, "where": back_on},
    }


def status(balancer: HAProxy) -> dict[str, str]:
    from sglang_hs import haproxy

    return {name: haproxy.look(str(balancer.socket), f"sglang/{name}")["status"] for name in NAMES}


def test_a_hook_that_fails_keeps_production_and_every_host_after_it(fleet: FleetRig, balancer: HAProxy) -> None:
    words = hooks(balancer)
    words["hs_before_leaving"]["command"][3] = "sglang/nobody"
    code, out = fleet.play("extract", hs_keep_serving=2, **words)
    assert code == 2, out[-3000:]
    assert "No such server" in out
    journals = fleet.journals()
    steps = [step["step"] for step in journals["hs-fleet-1"]]
    assert "leave" in steps
    assert "stop" not in steps, "production was stopped though the load balancer still sends to it"
    assert journals["hs-fleet-2"] == journals["hs-fleet-3"] == []
    assert set(status(balancer).values()) == {"UP"}


def test_rolling_never_shows_fewer_answers_than_allowed(fleet: FleetRig, balancer: HAProxy) -> None:
    places = {name: (address, PORT) for name, address in fleet.addresses.items()}
    direct = Prober(places)
    through = Prober({"through": ("127.0.0.1", balancer.port)})
    code, out = fleet.play("extract", hs_keep_serving="50%", **hooks(balancer, "host"))
    ticks, asked = direct.close(), through.close()
    assert code == 0, out[-4000:]
    assert min(len(tick.answers) for tick in ticks) == 2, [tick for tick in ticks if len(tick.answers) < 2][:3]
    assert all(tick.answers for tick in asked), "a request through HAProxy was lost"
    # each host was away once, and never two at a time by their own journals either
    times = {
        name: {(one["step"], one["state"]): one["at"] for one in steps} for name, steps in fleet.journals().items()
    }
    order = sorted(times, key=lambda name: times[name]["stop", "begun"])
    for before, after in zip(order, order[1:], strict=False):
        assert times[before]["restore: return", "done"] < times[after]["leave", "begun"]
    assert set(status(balancer).values()) == {"UP"}
    assert "30 of 30 samples" in out
    parts = [len(list(fleet.place(name, f"{OUTPUT}/hidden_states").glob("hs_*"))) for name in NAMES]
    assert sum(parts) == 30
    assert min(parts) > 0


def test_a_host_that_nobody_put_back_is_put_back_with_nothing_to_do(fleet: FleetRig, balancer: HAProxy) -> None:
    from sglang_hs import haproxy

    name = "hs-fleet-2"
    haproxy.set_state(
        str(balancer.socket), f"sglang/{name}", "drain"
    )  # as after a guard's restore, with a hook of the controller's
    fleet.place(name, "/var/lib/sglang-hs/left").write_text("run\n")
    assert status(balancer)[name] != "UP"
    code, out = fleet.play("plan", hs_keep_serving=2, **hooks(balancer))
    assert (code, fleet.place(name, "/var/lib/sglang-hs/left").exists()) == (0, True), out[-3000:]
    code, out = fleet.play("extract", hs_keep_serving=2, **hooks(balancer))
    assert code == 0, out[-3000:]
    assert set(status(balancer).values()) == {"UP"}
    assert not fleet.place(name, "/var/lib/sglang-hs/left").exists()


def test_too_few_hosts_to_let_one_go_is_refused(fleet: FleetRig) -> None:
    code, out = fleet.play("extract", hs_keep_serving=3)
    assert code == 2
    assert "keeps 3 of 3 hosts in production" in out


def test_nothing_is_left_behind(fleet: FleetRig) -> None:
    for name in NAMES:
        assert not fleet.place(name, "/var/lib/sglang-hs/left").exists()
        assert not fleet.place(name, "/var/lib/sglang-hs/lock").exists()
    (path,) = fleet.folder.glob("fleet/*/catalogue.json")
    assert json.loads(path.read_text())["complete"] is True
