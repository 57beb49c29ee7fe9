"""The engine's own activations, which are plain torch on a CPU."""

from sglang.srt.layers.activation import GeluAndMul as GeluAndMul
from sglang.srt.layers.activation import SiluAndMul as SiluAndMul
