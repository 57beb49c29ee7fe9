"""Runs on the target in the engine's own Python: asks the server for the hidden states of a data set and files them, verified.

``python -m sglang_hs_client run --spec SPEC.json``; see spec.py for the specification and docs/design.md for the reasons.
"""
