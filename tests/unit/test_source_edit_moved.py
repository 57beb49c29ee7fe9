"""What is compared between the trees of a file before and after an edit, and what is known to be the same by its place."""

from __future__ import annotations

import ast
from typing import List, Tuple

import pytest
from sglang_hs.source_edit_anchors import same_but_inserted

BEFORE = "a = 1\n@d\ndef f():\n    x = 1\n    return x\nb = [\n  2,\n]\n"


@pytest.mark.parametrize(
    ("after", "inserted", "same"),
    [
        ("new()\n" + BEFORE, [(1, 1)], True),
        (BEFORE.replace("    return", "    new()\n    return"), [(5, 5)], True),
        (BEFORE + "new()\n", [(9, 9)], True),
        (BEFORE.replace("@d", "@e\n@d"), [(2, 2)], False),  # the line became a part of what follows
        (BEFORE.replace("@d\n", "@d\n@e\n"), [(3, 3)], False),
        (BEFORE.replace("  2,", "  2,\n  3,"), [(8, 8)], False),
        (BEFORE.replace("a = 1", "a = 12"), [], False),
        ("new()\n" + BEFORE.replace("return x", "return x + 1"), [(1, 1)], False),
        ("new()\n" + BEFORE.replace("    x = 1", "    x = 1\n    y = 1"), [(1, 1)], False),
        ("new()\n" + BEFORE.replace("a = 1\n", "a = 1\nc = 1\n"), [(1, 1)], False),
        ("new(); " + BEFORE, [(1, 1)], False),
    ],
)
def test_only_whole_statements_on_the_inserted_lines_may_differ(
    after: str, inserted: List[Tuple[int, int]], same: bool
) -> None:
    assert same_but_inserted(ast.parse(BEFORE), ast.parse(after), inserted) is same
