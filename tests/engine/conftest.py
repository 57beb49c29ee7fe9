"""These tests run in the engine's Python (torch, safetensors, transformers): the packages that a run installs, put on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT / "files" / "engine", ROOT / "module_utils", Path(__file__).resolve().parent):
    sys.path.insert(0, str(folder))
