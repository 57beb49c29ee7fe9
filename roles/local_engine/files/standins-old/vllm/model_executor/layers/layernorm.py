"""The engine's own norms, which are plain torch on a CPU."""

from sglang.srt.layers.layernorm import GemmaRMSNorm as GemmaRMSNorm
from sglang.srt.layers.layernorm import RMSNorm as RMSNorm
