"""Releases before 0.5.10.post1 take a few layers from vLLM on a CPU without AMX: hand back the engine's own."""
