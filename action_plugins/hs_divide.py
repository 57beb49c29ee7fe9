"""Action: divide what is left of a data set among hosts, or merge what they have finished. On the controller alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase

sys.path.append(str(Path(__file__).resolve().parent.parent / "module_utils"))

from sglang_hs import joined
from sglang_hs.errors import HsError, told
from sglang_hs.fleet import Fleet
from sglang_hs.share import Index


class ActionModule(ActionBase):
    """hs_divide: see library/hs_divide.py."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _VALID_ARGS = frozenset(
        ("dir", "index", "hosts", "forget", "skip_bad_rows", "source", "plan", "merge", "join", "places")
    )

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Divide or merge."""
        result = super().run(tmp, task_vars)
        try:
            result.update(self._work(), changed=False)
        except HsError as error:
            result.update(failed=True, msg=str(error))
        except OSError as error:
            result.update(failed=True, msg=str(told(error)))
        return result

    def _work(self) -> dict[str, Any]:
        given = self._task.args
        fleet = Fleet(given["dir"])
        # older ansible-cores hand numbers over as text
        hosts = {str(host): float(share) for host, share in given["hosts"].items()}
        forget = [str(host) for host in given.get("forget") or []]
        if not boolean(given.get("merge", False)):
            index = Index.unpack((fleet.folder / given["index"]).read_text(encoding="utf-8"))
            skip = boolean(given.get("skip_bad_rows", False))
            plan = boolean(given.get("plan", False)) or self._task.check_mode
            return fleet.divide(index, hosts, forget, skip, str(given.get("source") or ""), plan)
        merged = fleet.merge(hosts, forget)
        if given.get("join"):
            places = {str(host): str(place) for host, place in (given.get("places") or {}).items()}
            merged["lines"] = [*merged["lines"], joined.join(Path(merged["path"]), places, Path(given["join"]))]
        return merged
