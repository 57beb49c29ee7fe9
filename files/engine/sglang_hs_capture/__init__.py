"""Runs inside the engine: hands the hidden states of asked-for sequences out of a DeepSeek-family model, and changes nothing else.

One block at the end of ``DeepseekV2Model.__init__`` calls :func:`attach` when SGLANG_HS_DUMP_DIR is set. What is captured,
where and in which file layout is told by the modules beside this one; docs/design.md tells why.
"""

from __future__ import annotations

from .hooks import attach

__all__ = ["attach"]
