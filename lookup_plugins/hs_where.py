"""Lookup: file and line of the inventory in which a variable is set, so that a message can name the place to edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ansible.plugins.lookup import LookupBase

DOCUMENTATION = r"""
name: hs_where
short_description: Tell where in the inventory a variable is set
description: Looks through the YAML files of the inventory in use for a line that sets the variable.
options:
  _terms: {description: Names of variables., required: true}
"""

EXAMPLES = r"""
- ansible.builtin.debug:
    msg: "{{ lookup('hs_where', 'hs_dataset') }}"
"""

RETURN = r"""
_raw: {description: 'C(file:line) of each, or the inventory folder where it is not set.', type: list, elements: str}
"""


class LookupModule(LookupBase):
    """hs_where."""

    def run(self, terms: list[str], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[str]:
        """file:line of each name."""
        folder = Path(str((variables or {}).get("inventory_dir") or "."))
        return [self._find(folder, str(term)) for term in terms]

    @staticmethod
    def _find(folder: Path, name: str) -> str:
        pattern = re.compile(r"\s*" + re.escape(name) + r"\s*:")
        for path in sorted(folder.rglob("*.yml")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if pattern.match(line):
                    try:
                        path = path.relative_to(Path.cwd())
                    except ValueError:
                        pass
                    return f"{path}:{number}"
        return f"{folder}/group_vars (not set there yet)"
