"""Make the code that runs on the target importable here: ``from sglang_hs import source_edit``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "module_utils"))
