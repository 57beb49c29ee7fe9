"""Releases before 0.5.10.post1 on a CPU without AMX: adjust three modules right after they are imported.

Python imports this file at its start, in every process of the engine. Those releases have no setting that imports a package
of ours before a model is built (SGLANG_EXTERNAL_MODEL_PACKAGE came later), hence a hook on the import.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from typing import Any


def _torch(module: Any) -> None:
    # gone from newer torch, still asked for by 0.5.1 and before
    if not hasattr(module._C._cpu, "_is_amx_tile_supported"):
        module._C._cpu._is_amx_tile_supported = lambda: False


def _deepseek(module: Any) -> None:
    # torch_native reads what the absorbed path stores, see sgl_cpu_ext
    if hasattr(module, "AttentionBackendRegistry"):
        module.AttentionBackendRegistry.register("torch_native", lambda attn, batch: module.AttnForwardMethod.MLA)
    else:
        module.DeepseekV2AttentionMLA.dispatch_attn_forward_method = lambda attn, batch: module.AttnForwardMethod.MLA
    if os.environ.get("SGL_CPU_EXTRA"):
        importlib.import_module(os.environ["SGL_CPU_EXTRA"])


def _runner(module: Any) -> None:
    inner = getattr(module.ModelRunner, "model_specific_adjustment", None)
    if inner is None:
        return

    def model_specific_adjustment(self: Any) -> None:
        # its only refusal of torch_native on a CPU is written for MLA models
        mla, self.use_mla_backend = self.use_mla_backend, False
        try:
            inner(self)
        finally:
            self.use_mla_backend = mla

    module.ModelRunner.model_specific_adjustment = model_specific_adjustment


_AFTER = {
    "torch": _torch,
    "sglang.srt.models.deepseek_v2": _deepseek,
    "sglang.srt.model_executor.model_runner": _runner,
}


class _Finder:
    """Finds what Python itself would, and adjusts it once it is loaded."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _AFTER[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
