"""Import-only stand-in for soundfile."""

import _import_stub

_import_stub.install(__name__, "0.13.1")
