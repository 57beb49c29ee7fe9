"""Import-only stand-in for torchao."""

import _import_stub

_import_stub.install(__name__, "0.9.0")
