"""Every module's documentation is readable by ansible-doc and names the options that the module takes, with the same defaults."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
# on the controller; their files in library/ are documentation
ACTIONS = ("hs_divide", "hs_fail", "hs_local_file", "hs_watch")
MODULES = sorted(path.stem for path in (REPO / "library").glob("hs_*.py"))


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("home")
    env = {**os.environ, "HOME": str(home), "ANSIBLE_HOME": str(home), "ANSIBLE_CONFIG": str(REPO / "ansible.cfg")}
    words = [str(Path(sys.executable).parent / "ansible-doc"), "-t", "module", "--json", *MODULES]
    done = subprocess.run(words, cwd=REPO, env=env, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def options_of(module: str) -> dict[str, dict[str, Any]]:
    """The argument spec in the module's own source: the dict that is given to run(), or to the action's module."""
    tree = ast.parse((REPO / "library" / f"{module}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run":
            spec: dict[str, dict[str, Any]] = ast.literal_eval(node.args[0])
            return spec
    raise AssertionError(f"{module} has no argument spec")


@pytest.mark.parametrize("module", MODULES)
def test_documentation_examples_and_returns_are_there(module: str, documented: dict[str, Any]) -> None:
    found = documented[module]
    assert found["doc"]["short_description"]
    assert found["examples"].strip()
    assert "return" in found
    assert found["doc"]["attributes"]["check_mode"]["support"] == "full"


@pytest.mark.parametrize("module", [module for module in MODULES if module not in ACTIONS])
def test_the_documented_options_are_those_that_the_module_takes(module: str, documented: dict[str, Any]) -> None:
    documentation = documented[module]["doc"]["options"]
    taken = options_of(module)
    assert set(documentation) == set(taken)
    for name, spec in taken.items():
        for key in ("type", "required", "default", "choices"):
            assert documentation[name].get(key, False if key == "required" else None) == spec.get(
                key, False if key == "required" else None
            ), f"{name}: {key}"


@pytest.mark.parametrize("action", ["hs_divide", "hs_local_file", "hs_watch"])
def test_the_action_takes_the_documented_options(action: str, documented: dict[str, Any]) -> None:
    text = (REPO / f"action_plugins/{action}.py").read_text()
    for name in documented[action]["doc"]["options"]:
        assert f'"{name}"' in text
