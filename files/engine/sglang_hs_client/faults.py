"""How a run can go wrong, as exceptions; each ends in one of the run's outcomes."""

from __future__ import annotations

from sglang_hs.errors import HsError


class SampleFault(Exception):
    """One sample could not be had; ``fatal``: a further attempt would give the same."""

    def __init__(self, reason: str, fatal: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fatal = fatal


class NoRoom(SampleFault):
    """The dump folder is full: no sample's fault."""


class ServerGone(Exception):
    """The server cannot be reached at all: no sample's fault."""


class CanaryRefused(HsError):
    """The states are not what they should be: nothing of the data set may be extracted."""


class OutputFault(HsError):
    """The output folder takes no more (full, read-only): the run stops, no sample is to blame."""
