"""Three hosts behind HAProxy, extracted one after the other with `hs_keep_serving=50%`: the fewest that answered at any look from outside.

Real systemd hosts with real servers, as in the rolling test. Four times a second each host's production is asked for a generation, all three at once; what
counts is the look with the fewest answers. *Through HAProxy* is the part of requests to HAProxy itself that were answered.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.frame import ROOT, Figure, Goal, Place

PYTHON = "controller"
ORDER = 160
HOSTS = {"hs-roll-1": 77, "hs-roll-2": 78, "hs-roll-3": 79}


def run(place: Place) -> Iterator[Figure]:
    """One roll."""
    sys.path.insert(0, str(ROOT))
    os.environ["SGL_CPU_FORK"] = "1"  # the engines' starts are not measured
    from tests.balancer import HAProxy, Prober
    from tests.fleet_rig import PORT, FleetRig

    def free() -> int:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            return int(one.getsockname()[1])

    tool = str(ROOT / "module_utils/sglang_hs/haproxy.py")
    # the path of an ssh control socket has at most 108 characters
    with tempfile.TemporaryDirectory(prefix="hs-", dir="/tmp") as folder:
        fleet = FleetRig(HOSTS, Path(folder), Path(os.environ["HS_CACHE"]))
        try:
            fleet.up(rows=30)
            servers = {name: f"{address}:{PORT}" for name, address in fleet.addresses.items()}
            balancer = HAProxy(fleet.folder, servers, free(), free())
            server = [str(balancer.socket), "sglang/{{ inventory_hostname }}"]
            try:
                direct = Prober({name: (address, PORT) for name, address in fleet.addresses.items()})
                through = Prober({"through": ("127.0.0.1", balancer.port)})
                code, out = fleet.play(
                    "extract",
                    hs_keep_serving="50%",
                    hs_before_leaving={"command": [sys.executable, tool, *server, "drain"]},
                    hs_after_returning={"command": [sys.executable, tool, *server, "ready"]},
                )
                ticks, asked = direct.close(), through.close()
            finally:
                balancer.close()
        finally:
            fleet.down()
    if code:
        raise RuntimeError(out[-4000:])
    fewest = min(len(tick.answers) for tick in ticks)
    span = ticks[-1].at - ticks[0].at
    away = sum(len(tick.answers) < len(HOSTS) for tick in ticks) / len(ticks)
    note = f"{len(ticks)} looks in {span:.0f} s; in {away:.0%} of them a host was away"
    yield place.absolute("rolling", "hosts", [float(fewest)], Goal("at least", 2), note=note)
    answered = sum(bool(tick.answers) for tick in asked) / len(asked)
    yield place.absolute(
        "rolling, through HAProxy", "of 1", [answered], Goal("at least", 1), note=f"{len(asked)} requests"
    )
