"""The edit itself: where it goes, what is refused, what state a file is in, and that the bytes come back."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from typing import Any

import pytest
from sglang_hs import source_edit
from sglang_hs.source_edit import EditRefused
from source_edit_helpers import END_OF_INIT, LINES, MODEL, Place, variant


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def refusal(call, reason):
    """The message of the refusal, which must be of this reason and in three parts."""
    with pytest.raises(EditRefused) as caught:
        call()
    assert caught.value.reason == reason, str(caught.value)
    message = str(caught.value)
    assert "Left as it was: " in message
    assert "Next: " in message
    return message


def shown(place, anchor, lines=("added = 1",)):
    """The edited file without the markers."""
    place.present([variant(anchor, list(lines))])
    return b"".join(line for line in place.read().splitlines(keepends=True) if b"[source_patch" not in line).decode()


# -- apply, again, undo ------------------------------------------------------------------------------------------------


def test_apply_inserts_one_block_and_says_where(place):
    result = place.present()
    assert result["changed"]
    assert (result["state_before"], result["state_after"]) == ("pristine", "patched")
    assert result["variant"] == "one"
    (block,) = result["insertions"]
    lines = place.read().decode().splitlines()
    assert lines[block["line"] - 1 : block["line"] - 1 + len(block["lines"])] == block["lines"]
    assert [line.strip() for line in block["lines"][1:-1]] == [line.strip() for line in LINES]
    assert block["where"] == "end of Model.__init__, after line 22"
    assert lines[block["line"] - 2].strip().startswith("self.norm = ")


def test_apply_twice_changes_nothing_the_second_time(place):
    place.present()
    once, info = place.read(), os.stat(place.file)
    result = place.present()
    assert not result["changed"]
    assert result["state_before"] == "patched"
    assert place.read() == once
    assert os.stat(place.file).st_ino == info.st_ino


def test_undo_gives_the_bytes_and_the_mtime_back_and_leaves_nothing_behind(place):
    place.present()
    result = place.undo()
    assert result["changed"]
    assert (result["state_before"], result["state_after"]) == ("patched", "pristine")
    assert place.read() == MODEL
    assert os.stat(place.file).st_mtime_ns == 10**18
    assert place.kept() == []
    assert place.beside() == []
    assert not place.undo()["changed"]


def test_undo_needs_neither_record_nor_backup_to_be_exact(place):
    place.present()
    for name in place.kept():
        (place.backup / name).unlink()
    assert place.undo()["changed"]
    assert place.read() == MODEL


def test_undo_with_an_unreadable_record_says_so_and_works(place):
    place.present()
    (record,) = place.backup.glob("*.json")
    record.write_text("{")
    result = place.undo()
    assert place.read() == MODEL
    assert "cannot be read" in result["notes"][0]


def test_undo_of_a_missing_file_is_nothing_to_do(place):
    place.file.unlink()
    result = place.undo()
    assert not result["changed"]
    assert result["state_before"] == "missing"


def test_plan_and_inspect_write_nothing(place):
    plan = place.plan()
    assert plan.changed
    assert place.inspect()["state"] == "pristine"
    assert place.read() == MODEL
    assert not place.backup.exists()
    assert place.beside() == []


def test_inspect_names_each_state(place):
    assert place.inspect()["state"] == "pristine"
    place.present()
    seen = place.inspect()
    assert (seen["state"], seen["variant"]) == ("patched", "one")
    place.file.write_bytes(place.read() + b"foreign = 1\n")
    seen = place.inspect()
    assert seen["state"] == "foreign"
    assert "'foreign = 1'" in seen["msg"]
    place.file.write_bytes(MODEL + b"upgraded = 1\n")
    assert place.inspect()["state"] == "replaced"
    place.file.unlink()
    assert place.inspect()["state"] == "missing"


def test_patched_file_runs_and_the_block_sees_self(place):
    place.present([variant(lines=["self.hooked = len(self.layers)"])])
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(place.read(), "model.py", "exec"), scope)
    model = scope["Model"](3)
    assert model.hooked == 3
    assert model.forward(0) == 3


# -- anchors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("anchor", "before", "behind"),
    [
        ({"position": "start"}, "from __future__ import annotations\n\nadded = 1\n", "import os\n"),
        ({"position": "end"}, "        return states, seen\nadded = 1\n", ""),
        ({"class": "Model", "position": "start"}, 'layers."""\n\n    added = 1\n', "    def __init__(self, layers"),
        ({"class": "Model", "position": "end"}, "        return states, seen\n    added = 1\n", ""),
        ({"class": "Layer", "position": "before"}, "import os\n\n\nadded = 1\n", "class Layer:"),
        ({"class": "Layer", "position": "after"}, "self.number = number\nadded = 1\n", "\n\nclass Model"),
        (
            {"class": "Model", "function": "forward", "position": "start"},
            '"""All layers."""\n        added = 1\n',
            "        seen = []",
        ),
        (
            {"class": "Model", "function": "forward", "statement": "layer = self.layers[...]", "position": "after"},
            "                layer = self.layers[i]\n                added = 1\n",
            "                states, residual",
        ),
        (
            {"class": "Model", "function": "forward", "statement": "for i in range(...):", "position": "start"},
            "range(len(self.layers)):\n            added = 1\n",
            "            with open",
        ),
        (
            {"class": "Model", "function": "forward", "statement": "for i in range(...):", "position": "after"},
            "layer.number, None\n        added = 1\n",
            "        if not seen:",
        ),
        (
            {"class": "Model", "function": "__init__", "statement": "self.layers = ...", "position": "after"},
            "        ]\n        added = 1\n",
            "        self.norm",
        ),
    ],
)
def test_each_kind_of_anchor_puts_the_line_where_it_says(place, anchor, before, behind):
    text = shown(place, anchor)
    assert text.count("added = 1") == 1
    assert before in text
    assert text.split("added = 1\n")[1].startswith(behind)


def test_decorated_and_nested_classes_of_the_same_name_are_told_apart(tmp_path):
    source = (
        b"def deco(x):\n    return x\n\n\nclass Outer:\n    class Model:\n"
        b"        def __init__(self):\n            self.a = 1\n"
        b"\n\n@deco\n@deco\nclass Model:\n    @deco\n    def __init__(self):\n        self.b = 2\n"
    )
    place = Place(tmp_path, source)
    assert shown(place, {"class": "Model", "position": "before"}).count("added = 1\n@deco\n@deco\nclass Model") == 1
    place.undo()
    assert "self.a = 1\n            added" in shown(
        place, {"class": "Outer.Model", "function": "__init__", "position": "end"}
    )
    place.undo()
    assert "self.b = 2\n        added" in shown(place, END_OF_INIT)
    place.undo()
    assert place.read() == source


@pytest.mark.parametrize(
    ("anchor", "words"),
    [
        ({"class": "Absent", "position": "end"}, "class Absent stands there 0 times"),
        ({"class": "Model", "function": "absent", "position": "end"}, "function absent stands there 0 times"),
        ({"statement": "import sys", "position": "after"}, "no such statement"),
        ({"class": "Model", "function": "forward", "statement": "return ...", "position": "before"}, "matches 2 times"),
        ({"class": "Model", "function": "forward", "position": "end"}, "returns at line"),
        (
            {"class": "Model", "function": "forward", "statement": "return states, seen", "position": "after"},
            "would never run",
        ),
        ({"class": "Model", "function": "forward", "statement": "seen = []", "position": "end"}, "has no body"),
    ],
)
def test_an_anchor_that_does_not_match_exactly_once_is_refused_by_name(place, anchor, words):
    message = refusal(lambda: place.plan([variant(anchor)]), "no_variant")
    assert words in message
    assert "one: anchor" in message
    assert place.read() == MODEL


def test_code_on_a_shared_line_is_refused(tmp_path):
    place = Place(tmp_path, b"class Model:\n    def __init__(self): self.a = 1\n    b = 1; c = 2\n")
    assert "shares line 2" in refusal(lambda: place.plan(), "no_variant")
    for position, line in (("before", "c = 2"), ("after", "b = 1")):
        anchor = {"class": "Model", "statement": line, "position": position}
        assert "shares line 3" in refusal(lambda a=anchor: place.plan([variant(a)]), "no_variant")


def test_an_elif_is_no_place_before_which_lines_can_go(tmp_path):
    place = Place(tmp_path, b"x = 1\nif x:\n    y = 1\nelif not x:\n    y = 2\n")
    anchor = {"statement": "if not x:", "position": "before"}
    refusal(lambda: place.plan([variant(anchor, ["z = 1"])]), "would_not_compile")


def test_early_return_can_be_allowed(tmp_path):
    place = Place(tmp_path, b"def f(x):\n    if x:\n        return 1\n    x = 2\n")
    anchor = {"function": "f", "position": "end"}
    refusal(lambda: place.plan([variant(anchor, ["x = 3"])]), "no_variant")
    assert place.present([variant({**anchor, "early_return": True}, ["x = 3"])])["changed"]


def test_the_variant_that_fits_is_chosen_and_the_others_are_named_when_none_does(place):
    first = variant({"class": "Old", "position": "end"}, name="old")
    second = variant(name="new", requires=[{"class": "Model", "function": "forward"}], forbids=[{"class": "Old"}])
    assert place.plan([first, second]).variant == "new"
    third = variant(name="third", forbids=[{"class": "Model", "function": "forward"}])
    message = refusal(lambda: place.plan([first, third]), "no_variant")
    assert "old: anchor end of Old: class Old stands there 0 times" in message
    assert "third: forbids Model.forward, which is there" in message


def test_variants_that_fit_alike_are_fine_and_those_that_differ_are_ambiguous(place):
    assert place.plan([variant(name="a"), variant(name="b")]).variant == "a"
    message = refusal(lambda: place.plan([variant(name="a"), variant(name="b", lines=["pass"])]), "ambiguous")
    assert "a, b" in message


def test_several_blocks_in_one_file_are_numbered_by_edit_and_undone_together(place):
    edits = [
        {"anchor": {"class": "Model", "function": "forward", "position": "start"}, "lines": ["a = 1"]},
        {"anchor": END_OF_INIT, "lines": ["b = 1", "", "c = 1"]},
        {"anchor": END_OF_INIT, "lines": ["d = 1"]},
        {"anchor": {"position": "end"}, "lines": ["e = 1"]},
        {"anchor": {"position": "end"}, "lines": ["f = 1"]},
    ]
    result = place.present([{"name": "many", "edits": edits}])
    assert [block["line"] for block in result["insertions"]] == sorted(block["line"] for block in result["insertions"])
    assert "block 1/5" in place.read().decode()
    assert not place.present([{"name": "many", "edits": edits}])["changed"]
    place.undo()
    assert place.read() == MODEL


def test_blocks_of_different_depth_at_one_place_go_in_from_the_inside_out(tmp_path):
    place = Place(tmp_path, b"class Model:\n    def __init__(self):\n        self.a = 1")
    edits = [{"anchor": anchor, "lines": ["b = 1"]} for anchor in ({"class": "Model", "position": "end"}, END_OF_INIT)]
    place.present([{"name": "both", "edits": edits}])
    code = [line for line in place.read().decode().splitlines() if "[source_patch" not in line]
    assert code[2:] == ["        self.a = 1", "        b = 1", "    b = 1"]
    place.undo()
    assert not place.read().endswith(b"\n")


def test_a_damaged_marker_is_refused_with_its_line(place):
    broken(place, lambda text: text.replace(" block 1/1", "", 1))
    place.file.write_bytes(MODEL)
    place.undo()
    broken(place, lambda text: text.replace(" of ", " OF "))


def test_a_block_that_became_part_of_a_text_is_refused(place):
    opened = place.plan().after.decode().splitlines()[17]
    assert "self.layers = [" in opened
    broken(place, lambda text: text.replace(opened, "        note = '''") + "'''\n")


def test_statement_patterns_are_syntax_not_text(tmp_path):
    source = b"x = f(  1,\n  'two', three=3)\ny = [a\n     for a in b]\nz = p if q else r\nw = p if q else s\n"
    for pattern, matches in [
        ('x = f(1, "two", three=3)', True),
        ("x = f(...)", True),
        ("x = f(1, ..., three=3)", True),
        ("x = f(..., three=...)", True),
        ("x = f(..., four=...)", False),
        ("x = f(1)", False),
        ("y = [a for a in b]", True),
        ("y = [a for a in c]", False),
        ("z = p if q else r", True),
        ("z = p if q else s", False),
    ]:
        place = Place(tmp_path, source)
        anchor = {"statement": pattern, "position": "after"}
        if matches:
            assert place.plan([variant(anchor)]).changed, pattern
        else:
            refusal(lambda p=place, a=anchor: p.plan([variant(a)]), "no_variant")


# -- bytes in, bytes out -----------------------------------------------------------------------------------------------

CLASS = b"class Model:\n    def __init__(self):\n        self.a = 1\n"

SOURCES = {
    "crlf": MODEL.replace(b"\n", b"\r\n"),
    "lone_cr": MODEL.replace(b"\n", b"\r"),
    "mixed_line_ends": CLASS.replace(b"\n", b"\r\n", 1) + b"z = 1\r\ny = 2\n",
    "no_final_newline": MODEL.rstrip(b"\n"),
    "block_at_the_end_without_final_newline": CLASS.rstrip(b"\n"),
    "block_at_the_end_without_final_newline_crlf": CLASS.rstrip(b"\n").replace(b"\n", b"\r\n"),
    "trailing_blank_lines": CLASS + b"\n\n    \n",
    "trailing_spaces_without_newline": CLASS + b"    ",
    "bom": b"\xef\xbb\xbf" + MODEL,
    "bom_then_class": b"\xef\xbb\xbf" + CLASS,
    "tabs": CLASS.replace(b"    ", b"\t"),
    "two_spaces": CLASS.replace(b"    ", b"  "),
    "form_feeds": b"\x0c\n" + CLASS.replace(b"        self", b"\x0c        self") + b"\x0cz = 1\n",
    "latin_1": b"# coding: latin-1\n# \xe9\xa0\xff\x85\n" + CLASS.replace(b"1", b"'\xe9'; self.b = '\x85\xa0'  # \xfc"),
    "shift_jis": b"# coding: shift_jis\n# \x83\x5c\x83\x7b\n" + CLASS,
    "vertical_tab_and_separators_in_a_string": CLASS.replace(b"1", b"'\x0b\x1c\x1d\xc2\x85\xe2\x80\xa8'"),
    "coding_on_line_two": b"#!/usr/bin/env python3\n# vim: set fileencoding=latin-1 :\n" + CLASS + b"# \xe9\n",
    "semicolon_at_the_end": CLASS.replace(b"1\n", b"1;\n"),
    "comment_behind": CLASS.replace(b"1\n", b"1  # why \\\n        # more\n"),
    "continuation": CLASS.replace(b"1\n", b"1 + \\\n            2\n"),
    "string_over_lines": CLASS.replace(b"1\n", b'"""\n# END\n"""\n'),
    "looks_like_an_old_marker": CLASS + b"# BEGIN ANSIBLE MANAGED BLOCK\n# END ANSIBLE MANAGED BLOCK\n",
    "async_and_nested": CLASS + b"    async def go(self):\n        async with self as x:\n            await x\n",
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    "anchor", [END_OF_INIT, {"position": "end"}, {"position": "start"}], ids=["init", "end", "start"]
)
def test_any_source_is_patched_once_and_undone_to_the_byte(tmp_path, name, anchor):
    source = SOURCES[name]
    place = Place(tmp_path, source)
    lines = ["if True:", "    added = 1"]
    assert place.present([variant(anchor, lines)])["changed"]
    patched = place.read()
    assert patched.count(b"added = 1") == 1
    assert patched.endswith((b"\n", b"\r")) == source.endswith((b"\n", b"\r"))
    assert patched.startswith(b"\xef\xbb\xbf") == source.startswith(b"\xef\xbb\xbf")
    compile(patched, "model.py", "exec")
    assert not place.present([variant(anchor, lines)])["changed"]
    assert place.read() == patched
    assert place.undo()["changed"]
    assert place.read() == source


def test_crlf_file_is_patched_once_with_its_own_line_ends(tmp_path):  # 1
    place = Place(tmp_path, SOURCES["crlf"])
    place.present()
    assert place.read().count(b"\n") == place.read().count(b"\r\n")
    assert not place.present()["changed"]


def test_lone_carriage_returns_stay(tmp_path):  # 32
    place = Place(tmp_path, SOURCES["lone_cr"])
    place.present()
    assert b"\n" not in place.read()
    assert place.undo()["changed"]
    assert place.read() == SOURCES["lone_cr"]


def test_end_marker_on_a_last_line_without_newline_is_recognised(tmp_path):  # 2
    place = Place(tmp_path, SOURCES["block_at_the_end_without_final_newline"])
    place.present()
    assert place.read().endswith(b"]")
    assert not place.present()["changed"]
    assert place.read().count(b"# BEGIN") == 1


def test_a_missing_final_newline_joins_no_lines_and_stays_missing(tmp_path):  # 3, 4
    source = SOURCES["block_at_the_end_without_final_newline"]
    place = Place(tmp_path, source)
    place.present()
    assert place.read().startswith(source + b"\n        # BEGIN")
    place.undo()
    assert place.read() == source


def test_the_byte_order_mark_stays_first(tmp_path):  # 31
    place = Place(tmp_path, b"\xef\xbb\xbfx = 1\n")
    place.present([variant({"position": "start"}, ["added = 1"])])
    assert place.read().startswith(b"\xef\xbb\xbf# BEGIN")
    place.undo()
    assert place.read() == b"\xef\xbb\xbfx = 1\n"


@pytest.mark.parametrize("source", [b"", b"\n", b"# only a comment", b"\xef\xbb\xbf", b'"""Only a docstring."""'])
def test_an_empty_file_can_be_edited_and_comes_back_empty(tmp_path, source):  # 29
    place = Place(tmp_path, source)
    for position in ("start", "end"):
        assert place.present([variant({"position": position}, ["added = 1"])])["changed"]
        compile(place.read(), "model.py", "exec")
        assert place.undo()["changed"]
        assert place.read() == source


def test_tabs_of_the_file_are_used_inside_the_block_too(tmp_path):
    place = Place(tmp_path, SOURCES["tabs"])
    place.present([variant(lines=["if True:", "    if True:", "        added = 1"])])
    assert b"\t\tif True:\n\t\t\tif True:\n\t\t\t\tadded = 1\n" in place.read()


def test_a_line_that_the_encoding_cannot_hold_is_refused(tmp_path):
    place = Place(tmp_path, SOURCES["latin_1"])
    refusal(lambda: place.plan([variant(lines=["x = '\u20ac'"])]), "bad_edits")


# -- markers that somebody touched -------------------------------------------------------------------------------------


def broken(place, change):
    """Patch, change the text, and see that nothing is edited or undone by luck."""
    place.present()
    text = change(place.read().decode())
    assert text != place.read().decode()
    place.file.write_text(text)
    for call in (place.present, place.undo):
        message = refusal(call, "foreign")
        assert place.read().decode() == text
    return message


def marker_lines(text):
    return [line for line in text.splitlines(keepends=True) if "[source_patch" in line]


def test_a_block_that_stands_there_twice_is_refused(place):  # 5
    def twice(text):
        begin, end = marker_lines(text)
        block = text[text.index(begin) : text.index(end) + len(end)]
        return text.replace(block, block + block)

    assert "2 of 1 blocks" in broken(place, twice)


def test_a_marker_inside_a_longer_line_is_no_marker(place):  # 6
    plan = place.plan()
    begin, end = marker_lines(plan.after.decode())
    # Quoted in a string: an ordinary file.
    quoted = MODEL + "NOTE = '''\n{}{}'''\n".format(begin, end).encode()
    place.file.write_bytes(quoted)
    assert place.present()["changed"]
    assert not place.present()["changed"]
    place.undo()
    assert place.read() == quoted
    # As a trailing comment: somebody changed our line. Refused, not guessed.
    place.file.write_bytes(MODEL)
    broken(place, lambda text: text.replace(end, "        x = 1  " + end.strip() + "\n"))


@pytest.mark.parametrize(
    "marker", ["two\nlines", "", "  ", "x", "tab\there", " led by a space", "\u00e9t\u00e9", "a" * 81]
)
def test_a_marker_that_is_empty_or_has_several_lines_is_refused(place, marker):  # 7, 8
    refusal(lambda: place.plan(marker=marker), "bad_edits")


def test_a_deleted_end_marker_is_refused_with_the_place(place):  # 9
    assert "has no end" in broken(place, lambda text: text.replace(marker_lines(text)[1], ""))


def test_a_stray_begin_marker_deletes_nothing(place):  # 10
    assert "has no end" in broken(place, lambda text: text + marker_lines(text)[0])


def test_reindented_markers_are_refused_not_duplicated(place):  # 11
    def deeper(text):
        begin, end = marker_lines(text)
        block = text[text.index(begin) : text.index(end) + len(end)]
        return text.replace(block, "".join("    " + line for line in block.splitlines(keepends=True)))

    # Our own lines only: what the original was is still proven, so the undo is exact.
    place.present()
    text = deeper(place.read().decode())
    place.file.write_text(text)
    assert place.present()["state_before"] == "patched_other_version"
    assert place.undo()["changed"]
    assert place.read() == MODEL
    # The whole file reformatted: refused.
    broken(place, lambda text: text.replace("    ", "  "))


def test_a_foreign_change_is_refused_with_its_line(place):
    message = broken(place, lambda text: text.replace("seen = []", "seen = [1]"))
    assert "line 31: '        seen = [1]'" in message
    assert str(place.backup) in message


def test_lines_without_their_markers_are_refused_not_inserted_again(place):
    place.present()
    text = place.read().decode()
    place.file.write_text("".join(line for line in text.splitlines(keepends=True) if "[source_patch" not in line))
    refusal(place.present, "already_there")


def test_a_second_edit_under_another_marker_is_refused(place):
    place.present(marker="first edit")
    refusal(lambda: place.present(marker="second edit"), "other_marker")
    place.undo()
    assert place.read() == MODEL


def test_a_changed_edit_replaces_the_old_one_from_the_original(place):  # 34
    first = place.present()
    result = place.present([variant(lines=["self.other = 2"])])
    assert result["changed"]
    assert result["state_before"] == "patched_other_version"
    assert result["patch_version"] != first["patch_version"]
    assert b"self.hooked" not in place.read()
    assert place.read().count(b"# BEGIN") == 1
    place.undo()
    assert place.read() == MODEL
    assert os.stat(place.file).st_mtime_ns == 10**18


def test_the_same_edit_written_differently_has_the_same_version(place):
    filled = {**END_OF_INIT, "statement": None, "early_return": False}
    one = place.plan([variant()])
    other = place.plan([variant(filled, "\n".join(LINES) + "\n", requires=[], forbids=[])])
    assert one.patch_version == other.patch_version


# -- a layout that nobody knows, an upgrade, old compiled code ---------------------------------------------------------


def test_drifted_code_is_refused_not_matched_by_luck(place):  # fuzz
    edit = variant(
        {"class": "Model", "function": "forward", "statement": "layer = self.layers[i]", "position": "after"}
    )
    for drift in (b"layer = self.blocks[i]", b"block = self.layers[i]", b"layer = self.layers[i + 1]"):
        changed = MODEL.replace(b"layer = self.layers[i]", drift)
        place.file.write_bytes(changed)
        assert "no such statement" in refusal(lambda: place.plan([edit]), "no_variant")
        assert place.read() == changed


def test_reformatted_and_commented_code_still_matches(place):
    edit = variant(
        {"class": "Model", "function": "forward", "statement": "layer = self.layers[i]", "position": "after"}
    )
    place.file.write_bytes(
        MODEL.replace(b"layer = self.layers[i]", b"# moved\n                layer = (\n  self.layers[ i ]\n)")
    )
    assert place.plan([edit]).changed


def test_upgrade_between_apply_and_undo_leaves_the_new_file_alone(place):  # upgrade
    place.present()
    new = MODEL.replace(b"All layers", b"Every layer")
    place.file.write_bytes(new)
    result = place.undo()
    assert not result["changed"]
    assert result["state_before"] == "replaced"
    assert place.read() == new
    assert place.kept() == ["stale"]
    assert len(os.listdir(place.backup / "stale")) == 2
    # And a new edit starts from the new file.
    assert place.present()["changed"]
    place.undo()
    assert place.read() == new


def test_upgrade_between_two_applies_edits_the_new_file(place):
    place.present()
    new = MODEL.replace(b"All layers", b"Every layer")
    place.file.write_bytes(new)
    result = place.present()
    assert result["state_before"] == "replaced"
    assert "set aside" in result["notes"][0]
    place.undo()
    assert place.read() == new


def test_old_compiled_code_never_runs(tmp_path):  # stale .pyc
    place = Place(tmp_path, b"class Model:\n    def __init__(self):\n        self.hooked = False\n")
    code = "import model; print(model.Model().hooked)"
    environment = {**os.environ, "PYTHONPATH": str(place.file.parent), "PYTHONDONTWRITEBYTECODE": ""}

    def run():
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return out.stdout.strip()

    edit = [variant(lines=["self.hooked = True"])]
    for _round in range(3):  # all within the same second
        assert run() == "False"
        assert place.beside() == ["__pycache__"]
        place.present(edit)
        assert os.listdir(place.file.parent / "__pycache__") == []
        assert run() == "True"
        place.undo()
        assert os.listdir(place.file.parent / "__pycache__") == []
    # A copy that Python never checks against its source.
    compiling = (
        "import py_compile; py_compile.compile({!r}, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)"
    )
    subprocess.run([sys.executable, "-c", compiling.format(str(place.file))], check=True)
    place.present(edit)
    assert run() == "True"


# -- what is given to it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variants", "words"),
    [
        ([], "at least one entry"),
        ("text", "not a list"),
        ([{"name": "a"}], "has no edits"),
        ([{"name": "a", "edits": []}], "at least one entry"),
        ([{"name": "a", "edits": [{"lines": ["x"]}]}], "has no anchor"),
        ([variant(name="a"), variant(name="a")], "same name"),
        ([{**variant(), "extra": 1}], "unknown key extra"),
        ([variant({"position": "inside"})], "position 'inside'"),
        ([variant({"position": "before"})], "names no class"),
        ([variant({"class": "1", "position": "end"})], "not a name"),
        ([variant({"statement": "x = = 1", "position": "after"})], "not a Python statement"),
        ([variant({"statement": "x = 1; y = 2", "position": "after"})], "not one statement"),
        ([variant({"statement": "...", "position": "after"})], "matches everything"),
        ([variant(lines=[])], "nothing in it"),
        ([variant(lines=["", " "])], "nothing in it"),
        ([variant(lines=[1])], "neither a list of texts"),
        ([variant(lines=["if x:"])], "not Python"),
        ([variant(lines=["x = 1\ny = 2"])], "control character"),
        ([variant(lines=["if x:", "\ty = 2"])], "control character"),
        ([variant(lines=['x = """', 'y"""'])], "over several lines"),
        ([variant(lines=["# [source_patch 0123456789ab block 1/1 of 0123456789abcdef]"])], "looks like a marker"),
        ([variant(requires=[{}])], "names no class"),
        ([variant(requires="x")], "not a list"),
    ],
)
def test_edits_of_another_shape_are_refused_by_name(place, variants, words):
    message = refusal(lambda: source_edit.plan(str(place.file), variants, str(place.backup)), "bad_edits")
    assert words in message


def test_lines_that_would_not_compile_there_are_refused_before_anything_is_written(place):  # 33
    message = refusal(
        lambda: place.plan([variant(lines=["return 1", "yield"], anchor={"position": "end"})]), "would_not_compile"
    )
    assert str(place.file) in message
    assert place.read() == MODEL


@pytest.mark.parametrize(
    ("anchor", "lines"),
    [
        ({"position": "start"}, ["return 1"]),
        ({"class": "Model", "position": "end"}, ["yield 1"]),
        ({"class": "Model", "function": "__init__", "position": "end"}, ["nonlocal nothing"]),
        ({"class": "Model", "function": "__init__", "position": "end"}, ["x = 1", "global x"]),
        ({"statement": "from __future__ import annotations", "position": "before"}, ["import os"]),
    ],
)
def test_what_the_compiler_says_beside_the_grammar_is_heard(tmp_path, anchor, lines):
    place = Place(
        tmp_path,
        b"from __future__ import annotations\n\n\nclass Other:\n    pass\n\n\n"
        b"class Model:\n    def __init__(self):\n        self.a = 1\n",
    )
    refusal(lambda: place.plan([variant(anchor, lines)]), "would_not_compile")


def test_a_continued_line_does_not_swallow_the_block(tmp_path):
    place = Place(tmp_path, b"x = 1 \\\n\ny = 2\n")
    anchor = {"statement": "x = 1", "position": "after"}
    assert "shares line 1" in refusal(lambda: place.plan([variant(anchor, ["added = 1"])]), "no_variant")


@pytest.mark.parametrize("path", ["lib/model.py", "./model.py", "", "model\0.py"])
def test_a_relative_path_is_refused(tmp_path, path):  # 35
    refusal(lambda: source_edit.plan(path, [variant()], str(tmp_path)), "relative_path")


@pytest.mark.parametrize("name", ['it\'s "quoted" $(x).py', "two  spaces.py", "-r.py", "[a]*.py", "\u00e9.py"])
def test_a_path_with_quotes_spaces_or_signs_works(tmp_path, name):  # 35
    place = Place(tmp_path, name=name)
    assert place.present()["changed"]
    place.undo()
    assert place.read() == MODEL


@pytest.mark.parametrize(
    "source", [b"def f(:\n", b"x = 1\0\n", b"\xff\xfe\n", b"# coding: no-such\nx = 1\n", b"x = '\xe9'\n"]
)
def test_a_file_that_python_cannot_parse_is_refused(tmp_path, source):
    place = Place(tmp_path, source)
    refusal(place.plan, "unparsable")
    assert place.read() == source


def test_the_edited_tree_is_the_old_one_plus_the_block(place):
    place.present()
    new = ast.parse(place.read())
    old = ast.parse(MODEL)
    init = next(item for item in ast.walk(new) if isinstance(item, ast.FunctionDef) and item.lineno == 16)
    del init.body[-2:]
    assert ast.dump(new) == ast.dump(old)
