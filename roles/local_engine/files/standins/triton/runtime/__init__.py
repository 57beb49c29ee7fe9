"""Import-only stand-in for triton.runtime."""

import _import_stub

_import_stub.install(__name__, "3.5.1")
