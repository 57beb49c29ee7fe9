"""Send the MLA prefill through the absorbed path.

With `--attention-backend torch_native` the engine picks the handler of "triton", whose MHA prefill does not store
what the torch_native backend reads. The engine imports this package, named in SGLANG_EXTERNAL_MODEL_PACKAGE,
before it builds a model; the registry it writes to is the engine's own.

SGL_CPU_EXTRA names one more package to import here: changes of the engine that a test wants.
"""

import importlib
import os

try:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
except ImportError:  # before 0.5.8
    from sglang.srt.models import deepseek_v2 as handlers

handlers.AttentionBackendRegistry.register("torch_native", lambda attn, forward_batch: handlers.AttnForwardMethod.MLA)

if os.environ.get("SGL_CPU_EXTRA"):
    importlib.import_module(os.environ["SGL_CPU_EXTRA"])
