"""The pages: every command has a test, every link and file name leads somewhere, what is written from the roles is up to date."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "tests"))

import docs_text  # noqa: E402

TESTS = sorted((REPO / "tests/e2e").glob("test_7_docs*.py")) + [REPO / "tests/e2e/test_7_night.py"]
LISTED: list[dict[str, str]] = yaml.safe_load((REPO / "tests/docs.yml").read_text())
PRINTED = {command.text: command for command in docs_text.commands()}
# output that a page shows as it comes
SHOWN = {"demo: 64 samples in .../.local/samples; production answers; engine source unchanged"}


def run_by_tests() -> set[str]:
    """The commands that the tests of the pages hand to doc() or good(), as whole literals."""
    found = set()
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                "doc",
                "good",
            ):
                if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
                    found.add(node.args[0].value)
    return found


def test_every_command_of_the_pages_is_run_by_a_test_or_listed_with_a_reason() -> None:
    known = run_by_tests() | {entry["command"] for entry in LISTED} | SHOWN
    missing = [f"{command.page}:{command.line}: {text}" for text, command in PRINTED.items() if text not in known]
    assert missing == [], "printed, but no test runs it and tests/docs.yml does not say why not"


def test_no_test_and_no_reason_outlives_its_command() -> None:
    stale = sorted((run_by_tests() | {entry["command"] for entry in LISTED} | SHOWN) - set(PRINTED))
    assert stale == []


def test_the_index_names_every_replacement_that_the_tests_make() -> None:
    made = re.findall(r'(?m)^            \("([^"]+)", ', (REPO / "tests/e2e/docs_run.py").read_text())
    told = re.findall(r"(?m)^\| `([^`]+)` \| ", (REPO / "docs/README.md").read_text())
    assert sorted(made) == sorted(told) != []


def test_every_reason_is_one_and_every_other_test_exists() -> None:
    for entry in LISTED:
        assert ("by" in entry) != ("why" in entry), entry
        if "by" in entry:
            assert (REPO / entry["by"]).is_file(), entry
            text = (REPO / entry["by"]).read_text()
            assert any(word in text for word in keywords(entry["command"])), (
                f"{entry['by']} does not look like a test of it"
            )


def keywords(command: str) -> list[str]:
    """Words one of which a test of the command must hold."""
    words = shlex.split(command)
    if words[0] == "make":
        return [
            words[1],
            {"unit": "pytest", "lint": "ruff", "compat-real": "compat import real"}.get(words[1], words[1]),
        ]
    return [word for word in words if word in ("verify", "export", "run", "ansible-doc")]


@pytest.mark.parametrize(
    "command", [entry["command"] for entry in LISTED if docs_text.program(entry["command"]) == "make"]
)
def test_make_knows_what_the_pages_make(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "-n"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_playbook_of_the_pages_exists_and_every_option_is_ansibles() -> None:
    for text in PRINTED:
        words = shlex.split(text)
        if words and words[0] == "ansible-playbook":
            assert (REPO / words[1]).is_file(), text
            # a report from a document asks no host
            if "-i" in words or "hs_report_document=" not in text:
                assert (REPO / words[words.index("-i") + 1]).is_dir(), text


def test_every_variable_of_the_pages_exists() -> None:
    known = set()
    for path in REPO.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            known |= set(entry.get("options") or {})
    known |= {
        path.stem
        for folder in ("library", "lookup_plugins", "filter_plugins", "callback_plugins")
        for path in REPO.glob(f"{folder}/hs_*")
    }
    known |= {
        "hs_result",
        "hs_report_path",
        "hs_found",
        "hs_data",
        "hs_edit",
        "hs_run",
        "hs_status_file",
        "hs_exit_status",
        "hs_connectors",
        "hs_must_be_given",
    }
    for page in docs_text.PAGES:
        for name in re.findall(r"(?<![\w./{-])hs_[a-z][a-z_]*[a-z](?![\w{])", page.read_text()):
            assert name in known, f"{page.name} names {name}"


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize(
    "page", [*docs_text.PAGES, *sorted(REPO.glob("roles/*/README.md"))], ids=lambda page: str(page.relative_to(REPO))
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(place), f"{page.name}: {target}"


MADE = {
    line.strip("/") for line in (REPO / ".gitignore").read_text().splitlines()
}  # by use of the project, not in a checkout
FOLDERS = "|".join(
    sorted(
        path.name
        for path in REPO.iterdir()
        if path.is_dir() and not path.name.startswith(".") and path.name not in MADE
    )
)


@pytest.mark.parametrize("page", docs_text.PAGES, ids=lambda page: page.name)
def test_every_file_of_this_project_that_a_page_names_is_there(page: Path) -> None:
    for name in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", page.read_text()):
        assert (REPO / name).exists() or list(REPO.glob(name + "*")), f"{page.name}: {name}"


def test_every_page_is_in_the_index() -> None:
    index = (REPO / "docs/README.md").read_text()
    for page in (REPO / "docs").glob("*.md"):
        assert page.name == "README.md" or page.name in index, page.name


def test_the_readme_fits_one_screen() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 60


def test_docs_written_from_the_roles_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_no_collection_beyond_builtin_is_used() -> None:
    """Every module that a task names is ansible.builtin's or the project's own; no FQCN of anything else stands anywhere."""
    ours = {path.stem for path in (REPO / "library").glob("*.py")}
    keywords_of_tasks = set(
        "name when block rescue always tags register vars loop loop_control changed_when failed_when check_mode diff environment no_log"
        " become delegate_to run_once until retries delay notify import_playbook args timeout ignore_unreachable any_errors_fatal".split()
    )

    def walk(tasks: Any, path: Path) -> None:
        for task in tasks or []:
            for key, value in task.items():
                if key in ("block", "rescue", "always"):
                    walk(value, path)
                elif key not in keywords_of_tasks:
                    assert key.startswith("ansible.builtin.") or key in ours, f"{path}: {key}"

    for path in REPO.glob("roles/*/tasks/*.yml"):
        walk(yaml.safe_load(path.read_text()), path)
    for path in REPO.glob("playbooks/*.yml"):
        for play in yaml.safe_load(path.read_text()):
            walk(play.get("tasks"), path)
    for path in [
        *REPO.glob("roles/**/*.yml"),
        *REPO.glob("playbooks/*.yml"),
        *REPO.glob("roles/**/*.j2"),
        *REPO.glob("templates/*.j2"),
    ]:
        for name in re.findall(r"\b(?:community|ansible|amazon|containers|kubernetes)\.\w+\.\w+", path.read_text()):
            assert name.startswith("ansible.builtin.") or name.startswith("ansible.module_utils"), f"{path}: {name}"
