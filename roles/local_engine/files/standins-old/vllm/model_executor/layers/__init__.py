"""See the package vllm."""
