"""Filters: how many hosts may be out of production at once, and where their samples are seen from here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError


def may_leave(keep: Any, hosts: Sequence[str], away: Sequence[str]) -> int:
    """Hosts that may be out of production together. keep: "50%" or a number of hosts that serve; away: those that do not serve now."""
    text = str(keep).strip()
    try:
        least = math.ceil(len(hosts) * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except ValueError:
        raise AnsibleFilterError(
            f"hs_keep_serving holds {keep!r}, which is neither a number of hosts nor a part of them such as 50%"
        ) from None
    count = len(hosts) - len(away) - least
    if count < 1:
        gone = f" ({', '.join(away)} serve nothing now)" if away else ""
        raise AnsibleFilterError(
            f"hs_keep_serving={keep} keeps {least} of {len(hosts)} hosts in production{gone}: none may leave.\n"
            "Left as it was: everything; production was not touched.\n"
            "Next: mend what is away, or keep fewer"
        )
    return count


def at_once(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> int:
    """For ``serial``: what the first play found for the hosts that it looked at; 0, all of them, where nothing is to be kept serving."""
    found = [hostvars[host].get("hs_out_at_once", 0) for host in hosts if host in hostvars]
    return max(map(int, found), default=0)


def places(hosts: Sequence[str], hostvars: Mapping[str, Any]) -> dict[str, str]:
    """Host -> its output folder as the controller sees it; of a host that is not there, as the inventory has it."""
    found = {}
    for host in hosts:
        known = hostvars[host] if host in hostvars else {}
        names = ("hs_place_told", "hs_fleet_place", "hs_output_dir")
        found[host] = next((str(known[name]) for name in names if name in known and known[name]), "")
    return found


class FilterModule:
    """hs_may_leave, hs_at_once, hs_places."""

    def filters(self) -> dict[str, Any]:
        """Name -> function."""
        return {"hs_may_leave": may_leave, "hs_at_once": at_once, "hs_places": places}
