"""docs/source_patch.md names a test for each report on other tools: all of them are there, and so are the tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PAGE = (HERE.parents[1] / "docs" / "source_patch.md").read_text(encoding="utf-8")
FILES = {
    "E": "test_source_edit.py",
    "F": "test_source_edit_files.py",
    "M": "test_source_patch_module.py",
    "P": "test_source_edit_properties.py",
}
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if re.match(r"\| ([0-9]+|-) \|", line)
]


def definitions_in(name):
    tree = ast.parse((HERE / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def named(cell):
    """(letter, test) of each test that a cell or a sentence names; a letter stands until the next."""
    found, letter = [], ""
    for word, test in re.findall(r"\b([EFMP]) (?=`)|`(test_\w+)`", cell.replace("\n", " ")):
        letter = word or letter
        if test:
            found.append((letter, test))
    return found


def test_every_report_is_in_the_table_once_and_in_order():
    assert [row[0] for row in ROWS] == [*map(str, range(1, 36)), "-", "-", "-"]
    for letter, name in FILES.items():
        assert "{} `{}`".format(letter, name) in PAGE.replace("\n", " ")


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_the_test_that_stands_for_a_report_is_there(number):
    _report, _where, what, cell = ROWS[number]
    assert what
    if cell == "the same":
        assert named(ROWS[number - 1][3]) or ROWS[number - 1][3] == "the same"
        return
    tests = named(cell)
    assert tests, cell
    for letter, test in tests:
        assert test in definitions_in(FILES[letter]), "{} has no {}".format(FILES[letter], test)


def test_the_other_tests_that_the_page_names_are_there():
    beside = named(PAGE.split("Beside them:")[1])
    assert beside
    for letter, test in beside:
        assert test in definitions_in(FILES[letter]), test
