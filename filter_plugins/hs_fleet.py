"""Filters: how many hosts may be out of production at once, and where their samples and reports are seen from here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError


def may_leave(
    keep: Any, hosts: Sequence[str], away: Sequence[str], resumed: Sequence[str] = (), leaves: bool = True
) -> int:
    """Hosts that may be out of production together, beside those that are. keep: "50%" or a number of hosts that serve.

    away: those that serve nothing, or were not looked at; resumed: those with an open run, out until it is gone on with. While these leave no room
    it is below 1. leaves: whether this host serves; only then is there anything to refuse.
    """
    text = str(keep).strip()
    try:
        least = math.ceil(len(hosts) * float(text[:-1]) / 100) if text.endswith("%") else int(text)
        if least < 0:
            raise ValueError(text)
    except (ValueError, OverflowError):
        raise AnsibleFilterError(
            f"hs_keep_serving holds {keep!r}, which is neither a number of hosts nor a part of them such as 50%"
        ) from None
    count = len(hosts) - len(away) - least
    if count < 1 and leaves:
        gone = f" ({', '.join(sorted(away))} serve nothing now, or were not looked at)" if away else ""
        raise AnsibleFilterError(
            f"hs_keep_serving={keep} keeps {least} of {len(hosts)} hosts in production{gone}: none may leave.\n"
            "Left as it was: everything; production was not touched.\n"
            "Next: mend what is away, start without --limit, or keep fewer"
        )
    return count - len(resumed)


def at_once(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> int:
    """For ``serial``: what the first play found for the hosts that it looked at; 0, all of them, where nothing is to be kept serving.

    The least: a host that was lost in an earlier round (finish.yml) still has that round's number.
    """
    known = [hostvars[host] for host in hosts if host in hostvars]
    found = [int(one["hs_out_at_once"]) for one in known if "hs_out_at_once" in one]
    return max(min(found), 1) if found else 0


def places(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, str]:
    """Host -> its output folder as the controller sees it; of a host that is not there, as the inventory has it."""
    found = {}
    for host in hosts:
        known = hostvars[host] if host in hostvars else {}
        names = ("hs_place_told", "hs_fleet_place", "hs_output_dir")
        found[host] = next((str(known[name]) for name in names if name in known and known[name]), "")
    return found


def pages(hosts: Sequence[str], folder: str) -> dict[str, str]:
    """Host -> the name of its last report in ``folder`` (HOST-RUN.html, a run's name begins with its time); empty where it has none."""
    names = sorted(path.name for path in Path(folder).glob("*.html"))
    found = {}
    for host in hosts:
        its = re.compile(re.escape(re.sub(r"[^\w.+-]", "_", host)) + r"-\d{8}-\d{6}-[0-9a-f]+\.html")
        found[host] = next((name for name in reversed(names) if its.fullmatch(name)), "")
    return found


class FilterModule:
    """hs_may_leave, hs_at_once, hs_places, hs_pages."""

    def filters(self) -> dict[str, Any]:
        """Name -> function."""
        return {"hs_may_leave": may_leave, "hs_at_once": at_once, "hs_places": places, "hs_pages": pages}
