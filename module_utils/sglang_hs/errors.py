"""The one error that a person reads: what happened, what was left as it was, what to do next."""

from __future__ import annotations


class HsError(Exception):
    """A refusal or failure in three parts; ``str()`` joins the parts that are there."""

    def __init__(self, what: str, left: str = "", next: str = "") -> None:
        self.what = what
        self.left = left
        self.next = next
        super().__init__(what, left, next)

    def __str__(self) -> str:
        parts = [self.what]
        if self.left:
            parts.append("Left as it was: " + self.left)
        if self.next:
            parts.append("Next: " + self.next)
        return "\n".join(parts)
