"""The way in without an edit: what SGLang's registry sees of it, and the model that the capture gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Dict

ENGINE = Path(__file__).resolve().parents[2] / "files" / "engine"

# packages of the same names as the real ones: of the engine, the module that is wrapped; of production, two models and a broken one
FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/models/__init__.py": "",
    "sglang/srt/models/deepseek_v2.py": "class DeepseekV2Model:\n    def __init__(self, size, *, name):\n        self.built = (size, name)\n",
    "sglang_hs_capture/__init__.py": "def attach(model):\n    print('attached', model.built)\n",
    "theirs/__init__.py": "print('theirs imported')\n",
    "theirs/one.py": "class One: pass\nEntryClass = One\n",
    "theirs/two.py": "class Two: pass\nclass Three: pass\nEntryClass = [Two, Three]\n",
    "theirs/off.py": "class Off: pass\nEntryClass = Off\n",
    "theirs/broken.py": "import no_such_module\n",
    "theirs/plain.py": "",
}
# what SGLang's registry does with the package that it is given, reduced to its calls
REGISTRY = """
import importlib, pkgutil
package = importlib.import_module("sglang_hs_models")
names = []
for _, name, is_package in pkgutil.iter_modules(package.__path__, "sglang_hs_models."):
    entry = getattr(importlib.import_module(name), "EntryClass", [])
    names += [each.__name__ for each in (entry if isinstance(entry, list) else [entry])]
print("models", sorted(names))
from sglang.srt.models.deepseek_v2 import DeepseekV2Model
importlib.import_module("sglang_hs_models").hand_over(DeepseekV2Model)  # a second time: still one attach
print("model", DeepseekV2Model(7, name="x").built)
"""


def run(folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    env: Dict[str, str] = {"PATH": os.environ["PATH"], "PYTHONPATH": "{}:{}".format(folder, ENGINE), **environment}
    return subprocess.run([sys.executable, "-c", REGISTRY], env=env, capture_output=True, text=True, timeout=60)


def test_the_model_is_handed_over_once_it_is_built(tmp_path: Path) -> None:
    done = run(tmp_path, SGLANG_HS_DUMP_DIR="/dev/shm/x")
    assert done.stdout.splitlines() == ["models []", "attached (7, 'x')", "model (7, 'x')"], done.stderr


def test_without_a_dump_folder_nothing_is_handed_over(tmp_path: Path) -> None:
    script = "import sglang_hs_models; from sglang.srt.models import deepseek_v2; print(deepseek_v2.DeepseekV2Model(7, name='x').built)"
    run(tmp_path)
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "{}:{}".format(tmp_path, ENGINE)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["(7, 'x')"], done.stderr


def test_the_package_that_production_names_is_imported_and_its_models_are_registered(tmp_path: Path) -> None:
    more = {"SGLANG_HS_CHAIN_MODEL_PACKAGE": "theirs", "SGLANG_DISABLED_MODEL_ARCHS": "off"}
    done = run(tmp_path, SGLANG_HS_DUMP_DIR="/dev/shm/x", **more)
    lines = done.stdout.splitlines()
    assert lines[0] == "theirs imported"
    assert "models ['One', 'Three', 'Two']" in lines, done.stderr
    assert "theirs.broken" in done.stderr


def test_a_package_that_is_not_there_fails_as_loudly_as_without_us(tmp_path: Path) -> None:
    done = run(tmp_path, SGLANG_HS_CHAIN_MODEL_PACKAGE="nobody")
    assert done.returncode != 0
    assert "No module named 'nobody'" in done.stderr
