"""Real sources of SGLang, one of each layout, changed as another release or a hand might: right or refused, never silently wrong.

Right means run: the capture that the edit put in took the known states, and forward returned what it returns without the edit.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize

import pytest

from compat import edit, execute, wheels

RELEASES = {"A": "0.5.3.post3", "B": "0.5.10.post1", "C": "0.5.14", "D": "0.5.21"}
RIGHT, REFUSED = "right", "refused"
MODEL = "DeepseekV2Model"


def lines_of(source, function):
    """First and last line, from 1, of a method of the model."""
    (model,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == MODEL]
    (found,) = [node for node in model.body if isinstance(node, ast.FunctionDef) and node.name == function]
    return found.lineno, found.end_lineno


def in_function(source, function, change):
    """The source with the text of one method of the model changed by ``change``."""
    first, last = lines_of(source, function)
    lines = source.splitlines(keepends=True)
    before = "".join(lines[first - 1 : last])
    after = change(before)
    assert after != before, "the mutation changes nothing"
    return "".join(lines[: first - 1]) + after + "".join(lines[last:])


def rename(old, new, function="forward"):
    return lambda source: in_function(
        source, function, lambda text: re.sub(r"(?<![.\w]){}(?!\w|=[^=])".format(old), new, text)
    )


def formatted(width):
    def change(source):
        options = ["--isolated", "--line-length", str(width), "--config", "format.skip-magic-trailing-comma=true"]
        words = ["ruff", "format", *options, "--stdin-filename", "deepseek_v2.py", "-"]
        done = subprocess.run(words, input=source, capture_output=True, text=True, check=True)
        assert done.stdout != source
        return done.stdout

    return change


def comments_moved(source):
    """Each comment behind code goes to a line of its own above it, and each of the model's lines gets one below it."""
    lines = source.splitlines(keepends=True)
    moved = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        row, column = token.start
        if token.type != tokenize.COMMENT:
            continue
        code = lines[row - 1][:column]
        if code.strip():
            indent = code[: len(code) - len(code.lstrip())]
            lines[row - 1] = indent + token.string + "\n" + code.rstrip() + "\n"
            moved += 1
    assert moved > 10
    text = "".join(lines)
    first, last = lines_of(text, "forward")
    lines = text.splitlines(keepends=True)
    lines[first:last] = [
        line + "            # moved\n" if line.rstrip().endswith((",", "(")) else line for line in lines[first:last]
    ]
    return "".join(lines)


def after_statement(statement, added):
    """``added`` on a line of its own behind the line that is ``statement``."""

    def change(text):
        return re.sub(r"(?m)^( +){}\n".format(re.escape(statement)), r"\g<0>\g<1>{}\n".format(added), text)

    return lambda source: in_function(source, "forward", change)


def loop_wrapped(source):
    first, last = lines_of(source, "forward")
    (loop,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.For) and first <= node.lineno <= last and "self.layers[i]" in ast.unparse(node)
    ]
    lines = source.splitlines(keepends=True)
    inner = ["    " + line if line.strip() else line for line in lines[loop.lineno - 1 : loop.end_lineno]]
    lines[loop.lineno - 1 : loop.end_lineno] = ["        with torch.no_grad():\n", *inner]
    return "".join(lines)


def class_renamed(source):
    return re.sub(r"\b{}\b".format(MODEL), "DeepseekV9Model", source)


def norm_renamed(source):
    return re.sub(r"\bself\.norm\b", "self.final_norm", source)


def layers_renamed(source):
    return re.sub(r"\bself\.layers\b", "self.blocks", source)


def at_end_of_init(added):
    return lambda source: in_function(source, "__init__", lambda text: text + added)


def called_around_its_hooks(name):
    return lambda source: in_function(
        source, "forward", lambda text: re.sub(r"(?<=[ (]){}\(".format(name), name + ".forward(", text)
    )


# What must come of each mutation; where layouts differ, by layout (a layout that is not there has no such thing).
MUTATIONS = {
    "formatted to 60 columns": (formatted(60), RIGHT),
    "formatted to 88 columns": (formatted(88), RIGHT),
    "formatted to 200 columns": (formatted(200), RIGHT),
    "comments moved": (comments_moved, RIGHT),
    "line ends of another system": (lambda source: source.replace("\n", "\r\n"), RIGHT),
    "the local of the states renamed": (rename("hidden_states", "states"), REFUSED),
    "the local of the residual renamed": (rename("residual", "rest"), {"A": REFUSED, "B": REFUSED, "C": REFUSED}),
    "the local of the layer renamed": (rename("layer", "block"), REFUSED),
    "a statement between two anchors": (after_statement("layer = self.layers[i]", "_depth = i + 1"), RIGHT),
    "the layer taken twice": (after_statement("layer = self.layers[i]", "layer = self.layers[i]"), RIGHT),
    "the loop in another with": (loop_wrapped, RIGHT),
    "the layer's forward called around its hooks": (
        called_around_its_hooks("layer"),
        {"A": REFUSED, "B": RIGHT, "C": REFUSED, "D": REFUSED},
    ),
    "the norm's forward called around its hooks": (
        called_around_its_hooks("self.norm"),
        {"A": REFUSED, "B": REFUSED, "C": REFUSED},
    ),
    "the class renamed": (class_renamed, REFUSED),
    "the norm renamed": (norm_renamed, REFUSED),
    "the list of layers renamed": (layers_renamed, REFUSED),
    "a statement at the end of __init__": (at_end_of_init("        self.ready = True\n"), RIGHT),
    "an early return in __init__": (
        at_end_of_init("        if config.pad_token_id == 0:\n            return\n        self.ready = True\n"),
        REFUSED,
    ),
}


@pytest.fixture(scope="module")
def folders():
    return wheels.get(list(RELEASES.values()))


def outcome(release, root, source, folder):
    """RIGHT or REFUSED, with the words; anything else is an answer that is wrong without saying so, and fails the test."""
    original = folder / "original.py"
    original.write_bytes(source)
    try:
        edited = edit.Edited(source, folder)
    except edit.EditRefused as error:
        return REFUSED, str(error)
    found = execute.in_child(release, root, original, edited.path)
    assert edited.undo()
    if "refused" in found:
        return REFUSED, found["refused"]
    assert "error" not in found, found["trace"]
    assert found["layout"] == edited.variant["name"] and found["states"] > 100
    return RIGHT, ""


CASES = [
    pytest.param(change, layout, what, id="{}-{}-{}".format(name, layout, what))
    for name, (change, expected) in MUTATIONS.items()
    for layout, what in (expected if isinstance(expected, dict) else dict.fromkeys(RELEASES, expected)).items()
]


@pytest.mark.parametrize(("change", "layout", "expected"), CASES)
def test_a_changed_source_is_edited_right_or_refused(folders, tmp_path, change, layout, expected):
    release = RELEASES[layout]
    source = (folders[release] / wheels.DEEPSEEK).read_text()
    changed = change(source)
    assert changed != source
    found, words = outcome(release, folders[release], changed.encode(), tmp_path)
    assert found == expected, words


# The judge itself: what is done to the *edited* source, and the words that it must find for it.
PLANTED = {
    "the block taken out": (
        lambda source: source.replace("_hs_capture.attach(self)", "pass"),
        "did not attach the capture",
    ),
    "a state changed before each layer": (
        after_statement("layer = self.layers[i]", "hidden_states.add_(1)"),
        "returns something else",
    ),
    "another answer": (
        lambda source: in_function(
            source, "forward", lambda text: text.replace("return hidden_states", "return hidden_states + 1")
        ),
        "returns something else",
    ),
    "another type of answer": (
        lambda source: in_function(
            source, "forward", lambda text: text.replace("return hidden_states", "return [hidden_states]")
        ),
        "returns something else",
    ),
    "a layer left out": (
        after_statement("layer = self.layers[i]", "layer = self.layers[min(i, 1)]"),
        "returns something else",
    ),
    "a name that nobody supplies, the error swallowed": (
        after_statement(
            "layer = self.layers[i]", "with __import__('contextlib').suppress(Exception): model_forward_maybe_tbo()"
        ),
        "model_forward_maybe_tbo is not supplied, and was called",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_judge_finds_what_is_wrong(folders, tmp_path, name):
    release = RELEASES["B"]
    source = (folders[release] / wheels.DEEPSEEK).read_bytes()
    original = tmp_path / "original.py"
    original.write_bytes(source)
    edited = edit.Edited(source, tmp_path)
    change, words = PLANTED[name]
    edited.path.write_text(change(edited.path.read_text()))
    found = execute.in_child(release, folders[release], original, edited.path)
    assert words in found.get("error", "nothing"), found


@pytest.mark.parametrize("layout", RELEASES)
@pytest.mark.parametrize(
    ("method", "words"),
    [("boundary", "boundary 0 is off by"), ("final", "state is off by")],
)
def test_the_judge_finds_a_capture_that_is_wrong(folders, tmp_path, monkeypatch, layout, method, words):
    from sglang_hs_capture import recorder

    real = getattr(recorder.Recorder, method)
    # only the copy that is captured is changed, so that the model's own answer stays right
    wrong = {
        "boundary": lambda self, index, state: real(self, index, state + (index == 0)),
        "final": lambda self, args, output: real(self, args, tuple(value + 1 for value in output)),
    }
    monkeypatch.setattr(recorder.Recorder, method, wrong[method])
    release = RELEASES[layout]
    source = (folders[release] / wheels.DEEPSEEK).read_bytes()
    original = tmp_path / "original.py"
    original.write_bytes(source)
    edited = edit.Edited(source, tmp_path)
    found = execute.in_child(release, folders[release], original, edited.path)
    assert words in found.get("error", "nothing"), found
