"""The one error that a person reads: what happened, what was left as it was, what to do next."""

from __future__ import annotations

import errno
import os


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


_BY_ERRNO = {
    errno.ENOSPC: "free some space on its file system (df -h, df -i), then start again",
    errno.EDQUOT: "free some of the quota there, then start again",
    errno.EROFS: "its file system is mounted read-only: dmesg tells why; remount it, then start again",
}


def told(error: OSError) -> HsError:
    """A refusal of the system as a message: which file it was, and what to look at."""
    said = os.strerror(error.errno) if error.errno else str(error)
    what = "{}: {}".format(error.filename, said) if error.filename else str(error)
    next = _BY_ERRNO.get(error.errno or 0, "look at that file or folder's owner, mode and file system")
    return HsError(what, "nothing else was changed by this step", next)
