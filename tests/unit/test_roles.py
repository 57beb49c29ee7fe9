"""Roles say what they take and how they behave: defaults, argument specs and READMEs agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
ROLES = sorted(path.name for path in (REPO / "roles").iterdir())


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("role", ROLES)
def test_every_default_has_a_comment_and_a_spec_with_the_same_value(role: str) -> None:
    folder = REPO / "roles" / role
    text = (folder / "defaults/main.yml").read_text()
    defaults = yaml.safe_load(text)
    specs = loaded(folder / "meta/argument_specs.yml")["argument_specs"]
    known: dict[str, Any] = {}
    for entry in specs.values():
        known.update(entry.get("options", {}))
    assert set(defaults) <= set(known), "variables without a spec"
    for name, value in defaults.items():
        assert known[name]["description"], name
        if not (isinstance(value, str) and "{{" in value):
            assert known[name].get("default") == value, name
    for match in re.finditer(r"(?m)^(\w+):", text):
        above = text[: match.start()].splitlines()[-1:]
        assert above and (above[0].startswith("#") or re.match(r"\w+:", above[0])), f"{match.group(1)} has no comment"


@pytest.mark.parametrize("role", ROLES)
def test_every_readme_says_idempotent_atomic_reversible(role: str) -> None:
    text = (REPO / "roles" / role / "README.md").read_text().lower()
    for word in ("idempotent", "atomic", "reversible"):
        assert word in text


def test_what_serves_the_restore_is_imported_never_included() -> None:
    """What is included is read when its turn comes: too late where the project's folder was changed or lost meanwhile."""
    outside = {"divide.yml", "catalogue.yml"}  # before anything is touched, and after production is back
    playbooks = [path for path in (REPO / "playbooks").glob("*.yml") if path.name not in outside]
    for path in [*playbooks, *(REPO / "roles").glob("*/tasks/*.yml")]:
        assert not re.search(r"\binclude_(role|tasks|vars)\b", path.read_text()), path


def test_the_story_fits_one_screen() -> None:
    lines = (REPO / "playbooks/extract.yml").read_text().splitlines()
    assert len(lines) <= 75


def test_the_same_variable_has_the_same_default_in_every_role() -> None:
    seen: dict[str, Any] = {}
    for role in ROLES:
        for name, value in loaded(REPO / "roles" / role / "defaults/main.yml").items():
            assert seen.setdefault(name, value) == value, f"{name} in {role}"


def test_every_variable_that_a_message_names_exists() -> None:
    variables = set()
    for role in ROLES:
        variables |= set(loaded(REPO / "roles" / role / "defaults/main.yml"))
    others = {path.stem for folder in ("library", "lookup_plugins") for path in (REPO / folder).glob("hs_*.py")}
    for path in [*(REPO / "module_utils").rglob("*.py"), *(REPO / "files").rglob("*.py")]:
        for name in re.findall(r"(?<![\w./-])hs_[a-z_]+", path.read_text()):
            # hs_{i}.safetensors and hs_connectors are the trainers' names
            assert name in variables | others | {"hs_", "hs_connectors", "hs_module"}, f"{path.name} names {name}"


def test_move_refuses_an_open_run_before_it_installs_anything() -> None:
    """What brings production back is the program that the run was begun with."""
    tasks = loaded(REPO / "roles/move_samples/tasks/main.yml")
    look, install, start = (next(place for place, task in enumerate(tasks) if wanted(task)) for wanted in (
        lambda task: "hs_move" in task and task.get("check_mode") is True,
        lambda task: "hs_install" in task,
        lambda task: "hs_move" in task and "check_mode" not in task,
    ))  # fmt: skip
    assert look < install < start and tasks[look]["hs_move"] == tasks[start]["hs_move"]
