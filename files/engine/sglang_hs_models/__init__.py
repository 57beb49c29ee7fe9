"""The way in that edits nothing: SGLang imports the package that SGLANG_EXTERNAL_MODEL_PACKAGE names before it builds a model.

It does what the edit of ``DeepseekV2Model.__init__`` does, no more: at its end the model goes to the capture helper. A package
that production itself names there is imported first, and its models are registered as if it stood there still (see chained.py).
Inert without SGLANG_HS_DUMP_DIR, as the edit is.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

CHAIN = "SGLANG_HS_CHAIN_MODEL_PACKAGE"


def hand_over(model_class: Any) -> None:
    """Make ``model_class.__init__`` end with the capture's ``attach``; once, however often it is asked for."""
    built = model_class.__init__
    if getattr(built, "hands_over", False):
        return

    @functools.wraps(built)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        capture = importlib.import_module("sglang_hs_capture")
        capture.attach(self)

    init.hands_over = True  # type: ignore[attr-defined]
    model_class.__init__ = init


if os.environ.get(CHAIN):
    importlib.import_module(os.environ[CHAIN])  # fails as loudly as it would without us
if os.environ.get("SGLANG_HS_DUMP_DIR"):
    # after the chained package: it may put a class of its own in this place
    hand_over(importlib.import_module("sglang.srt.models.deepseek_v2").DeepseekV2Model)
