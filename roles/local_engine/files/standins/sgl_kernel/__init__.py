"""Import-only stand-in for sgl_kernel."""

import _import_stub

_import_stub.install(__name__, "0.4.1")
