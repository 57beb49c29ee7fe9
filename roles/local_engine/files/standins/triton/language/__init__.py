"""Import-only stand-in for triton.language."""

from typing import Any

import _import_stub


class constexpr:
    """A constant of a kernel; the engine makes some at import."""

    def __init__(self, value: Any) -> None:
        self.value = value


_import_stub.install(__name__, "3.5.1")
