"""Import-only stand-in for sgl_kernel."""

import _forked
import _import_stub

_import_stub.install(__name__, "0.4.1")
_forked.install()
