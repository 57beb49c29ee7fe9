"""These tests run in the engine's Python (torch, yaml), started by tests/e2e/test_7_compat.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
