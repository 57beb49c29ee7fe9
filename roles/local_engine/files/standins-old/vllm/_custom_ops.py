"""Import-only stand-in for vLLM's kernels."""

import _import_stub

_import_stub.install(__name__, "0")
