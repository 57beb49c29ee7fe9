"""Filters: words quoted as systemd reads them (systemd.syntax(7), systemd.service(5), systemd.exec(5))."""

from __future__ import annotations

from typing import Any, Callable


def systemd_assignment(word: Any) -> str:
    """``NAME=value`` as one assignment of Environment=: quoted, backslash and quote escaped, ``%`` (specifiers) doubled."""
    text = str(word)
    if "\n" in text or "\0" in text:
        raise ValueError("a line break cannot stand in a unit")
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + text + '"'


def systemd_word(word: Any) -> str:
    """``word`` as one argument of ExecStart=: as an assignment, and ``$`` (variables, expanded there only) doubled."""
    return systemd_assignment(word).replace("$", "$$")


class FilterModule:
    """hs_systemd_word, hs_systemd_assignment."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names of the filters."""
        return {"hs_systemd_word": systemd_word, "hs_systemd_assignment": systemd_assignment}
