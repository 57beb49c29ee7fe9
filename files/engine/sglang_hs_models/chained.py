"""The models of the package that production names in SGLANG_EXTERNAL_MODEL_PACKAGE, found as SGLang's own registry finds them.

The registry looks through the modules of the package that it is given (this one's, now) for the name ``EntryClass``.
"""

from __future__ import annotations

import importlib
import logging
import os
import pkgutil
from typing import Any, List

from . import CHAIN

log = logging.getLogger("sglang_hs_models")


def models(package_name: str) -> List[Any]:
    """The classes that the modules of ``package_name`` offer; a module that cannot be imported is passed over, as SGLang does."""
    package = importlib.import_module(package_name)
    disabled = os.environ.get("SGLANG_DISABLED_MODEL_ARCHS", "").split(",")
    found: List[Any] = []
    for _, name, is_package in pkgutil.iter_modules(package.__path__, package_name + "."):
        if is_package or name.split(".")[-1] in disabled:
            continue
        try:
            entry = getattr(importlib.import_module(name), "EntryClass", [])
        except Exception as error:
            log.warning("Ignore import error when loading %s: %s", name, error)
            continue
        found += entry if isinstance(entry, list) else [entry]
    return found


EntryClass = models(os.environ[CHAIN]) if os.environ.get(CHAIN) else []
