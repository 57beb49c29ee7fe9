"""Over sources that hypothesis makes up: undo(apply(x)) is x to the byte, apply twice is apply once.

``SOURCE_EDIT_EXAMPLES=100000 pytest tests/unit/test_source_edit_properties.py`` is the long run.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from source_edit_helpers import Place, variant

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sglang_hs.source_edit import EditRefused

EXAMPLES = int(os.environ.get("SOURCE_EDIT_EXAMPLES", "200"))
ROOT = "/dev/shm" if os.path.isdir("/dev/shm") else None

OLD_MARKER = "# BEGIN source_patch [source_patch 0123456789ab block 1/1 of 0123456789abcdef]"
DAMAGED_MARKER = "# END source_patch [source_patch 0123456789ab block 1/1 of 0123456789abcdef] and more"

# Statements of one or several lines, as they stand at the left margin.
STATEMENTS = st.sampled_from(
    [
        "a = 1",
        "a = 1; b = 2",
        "a = 1;",
        "a = (1,\n  # in between\n  2)",
        "a = 1 + \\\n  2",
        "a = '''\n{}\n'''".format(OLD_MARKER),
        'a = """x\n    y # END"""  # trailing',
        "a = 'é ü'  # ñ",
        "# only a comment \\",
        "",
        "    ",
        "\x0c",
        "\x0ca = 1",
        "if a: b = 1",
        "if a:\n    b = 1\nelif b:\n    pass\nelse:\n    c = 1",
        "for i in range(3):\n    pass",
        "try:\n    a = 1\nfinally:\n    b = 1",
        "with a as b:\n\tc = 1",
        "def f(x):\n    return x",
        "@a\n@(b)\ndef f(x):\n    '''Doc.'''\n    return x",
        "class C:\n    class C:\n        x = 1",
        "class Other:\n    class Target:\n        def __init__(self):\n            self.a = 1",
        "def Target():\n    class Target:\n        def __init__(self):\n            self.a = 1",
        DAMAGED_MARKER,
        "a = {!r}".format(OLD_MARKER),
        "a = f'{{a}} {}'".format(OLD_MARKER),
        "\x0c\x0cclass Page:\n\x0c    x = 1",
        "@property\ndef f(self): return 1",
        "async def g():\n    await a",
        "lambda: (yield)",
    ]
)


def indented(text: str, indent: str) -> str:
    """A statement behind an indentation (not the inner lines of a string, but these are none the worse for it)."""
    return "\n".join(indent + line if line.strip("\x0c") else line for line in text.split("\n"))


@st.composite
def sources(draw):
    """(bytes, whether the edits' anchor stands in it)."""
    indent = draw(st.sampled_from(["    ", "\t", "  ", " "]))
    eol = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    encoding = draw(st.sampled_from(["utf-8", "utf-8-sig", "latin-1", "cp1252", "koi8-r", "shift_jis"]))
    head = ["# -*- coding: {} -*-".format(encoding)] if encoding not in ("utf-8", "utf-8-sig") else []
    body = draw(st.lists(STATEMENTS, max_size=4))
    init = draw(st.lists(STATEMENTS, max_size=4))
    tail = draw(st.lists(STATEMENTS, max_size=3))
    decorated = draw(st.sampled_from([[], ["@a"], ["@a", "@b(", "    1)", "# why"]]))
    inner = draw(
        st.sampled_from([[], [indent + "class Target:", indent * 2 + "def __init__(self):", indent * 3 + "self.a = 1"]])
    )
    lines = [*head, *body, *decorated, "class Target:", *inner, *(indent + line for line in decorated)]
    lines += [indent + "def __init__(self):", indent * 2 + "self.a = 1"]
    lines += [indented(item, indent * 2) for item in init] + tail
    text = "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n\n", "\n    "]))
    if eol != "\n" and draw(st.booleans()):  # mixed line ends
        where = draw(st.integers(0, len(text)))
        text = text[:where].replace("\n", eol) + text[where:]
    else:
        text = text.replace("\n", eol)
    return text.encode(encoding, "replace")


ANCHORS = st.sampled_from(
    [
        {"class": "Target", "function": "__init__", "position": "end"},
        {"class": "Target", "function": "__init__", "position": "start"},
        {"class": "Target", "function": "__init__", "statement": "self.a = 1", "position": "before"},
        {"class": "Target", "function": "__init__", "statement": "self.a = 1", "position": "after"},
        {"class": "Target", "position": "before"},
        {"class": "Target", "position": "end"},
        {"position": "start"},
        {"position": "end"},
    ]
)
LINES = st.sampled_from([["added = 1"], ["if added:", "    added = 1", "", "    added = 2"], ["# a comment only"]])


def parses(source: bytes) -> bool:
    try:
        compile(source, "x.py", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(source=sources(), edits=st.lists(st.tuples(ANCHORS, LINES), min_size=1, max_size=3))
def test_undo_of_apply_is_the_original_and_apply_twice_is_apply_once(source, edits):
    assume(parses(source))
    one = {"name": "x", "edits": [{"anchor": anchor, "lines": lines} for anchor, lines in edits]}
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        place = Place(Path(folder), source)
        try:
            result = place.present([one])
        except EditRefused as error:
            # Refusing is right for a source that has no such place; then nothing happened.
            # A comment that is a marker but for its end was one: nobody can say what the original was.
            foreign = ("foreign",) if DAMAGED_MARKER.encode() in source else ()
            assert error.reason in ("no_variant", "would_not_compile", "already_there", *foreign), str(error)
            assert place.read() == source
            assert place.beside() == []
            return
        patched = place.read()
        assert result["changed"]
        assert len(result["insertions"]) == len(edits)
        assert parses(patched)
        assert not place.present([one])["changed"]
        assert place.read() == patched
        assert place.undo()["changed"]
        assert place.read() == source
        assert place.kept() == []


@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(source=sources(), cut=st.integers(0, 10**6), size=st.integers(0, 40), text=st.binary(max_size=12))
def test_any_change_of_a_patched_file_is_refused_or_undone_exactly(source, cut, size, text):
    assume(parses(source))
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        place = Place(Path(folder), source)
        try:
            place.present([variant({"class": "Target", "position": "before"}, ["added = 1"])])
        except EditRefused:
            return
        patched = place.read()
        cut %= len(patched) + 1
        changed = patched[:cut] + text + patched[cut + size :]
        place.file.write_bytes(changed)
        try:
            place.undo()
        except EditRefused as error:
            assert error.reason == "foreign", str(error)
            assert place.read() == changed
            return
        # Undone: then it is the original, byte for byte. Not ours any more: then nobody touched it.
        assert place.read() in (source, changed)
        if place.read() == changed and changed != source:
            assert b"[source_patch" not in changed.replace(OLD_MARKER.encode(), b"")
