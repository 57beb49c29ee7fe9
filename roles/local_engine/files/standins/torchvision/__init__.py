"""Import-only stand-in for torchvision."""

import _import_stub

_import_stub.install(__name__, "0.28.0")
