"""Places in a Python source file, for :mod:`source_edit`: a source in bytes, its syntax tree, and anchors in it.

Standard library only. Nothing here writes.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .source_edit_files import EditRefused

# What Python takes for the end of a line. bytes.splitlines() would do, str.splitlines() would not: it also cuts at
# form feeds and at characters that are ordinary ones in a Latin-1 file.
BOM = b"\xef\xbb\xbf"

_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LEAVES = (ast.Return, ast.Raise, ast.Break, ast.Continue)
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_NEVER_COMPARED = {"ctx", "kind"}
_NOT_COMPARED = {"type_comment", *_BODIES}  # in a statement; a lambda has a body too

Definition = Union[ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef]


class NoMatch(Exception):
    """An anchor that does not stand exactly once in this source, or stands where nothing can be inserted."""


class Place(NamedTuple):
    """Where lines go in: before the byte ``offset``, each behind ``indent``."""

    offset: int
    indent: bytes
    eol: bytes
    where: str


class Source:
    """A Python source file: its bytes, its physical lines and its syntax tree.

    Raises EditRefused when this Python cannot parse it.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.data = data
        self.path = path
        self._statements: Dict[ast.AST, List[ast.stmt]] = {}
        self.lines = split_lines(data)
        self.offsets = [0]
        for line in self.lines:
            self.offsets.append(self.offsets[-1] + len(line))
        try:
            self.encoding = encoding_of(self.lines)
            self.tree = parse(data, path)
            text = data.decode(self.encoding)
        except (SyntaxError, ValueError, RecursionError, MemoryError, LookupError) as error:
            place = getattr(error, "lineno", None)
            raise EditRefused(
                "unparsable",
                "{} cannot be parsed{}: {}.".format(path, " (line {})".format(place) if place else "", _brief(error)),
                "Is it whole, and does the Python that runs this ({}) know its syntax? Run it with the Python that "
                "runs the package.".format(_python()),
            ) from error
        self.text_lines = list(io.StringIO(text, newline=""))  # str.splitlines knows more ends than Python's sources
        bom = len(BOM) if data.startswith(BOM) else 0
        if len(self.text_lines) != len(
            split_lines(data[bom:]) if bom else self.lines
        ):  # UTF-7 spells a line end in letters
            raise EditRefused(
                "unparsable",
                "The line ends of {} cannot be told in its encoding {}.".format(path, self.encoding),
                "Such a file is not supported.",
            )

    def statements(self, scope: Any) -> List[ast.stmt]:
        """Of a module, class or function of this tree, see :func:`walk_statements`: every condition of every variant asks for them."""
        if scope not in self._statements:
            self._statements[scope] = list(walk_statements(scope.body))
        return self._statements[scope]

    def eol_at(self, offset: int) -> bytes:
        """The line end in use around an offset: of the line before it, else of the file's first line."""
        for index in (self._line_ending_at(offset) - 1, 0):
            if 0 <= index < len(self.lines):
                line = self.lines[index]
                eol = line[len(line.rstrip(b"\r\n")) :]
                if eol:
                    return b"\r\n" if eol.endswith(b"\r\n") else eol[-1:]
        return b"\n"

    def _line_ending_at(self, offset: int) -> int:
        return next(index for index, start in enumerate(self.offsets) if start >= offset)

    def before(self, node: ast.AST) -> Tuple[str, bytes]:
        """What stands before a node on its line: (text, the indentation in bytes of the file)."""
        line = self.text_lines[_first_line(node) - 1]
        text = _cut(line, node.col_offset)[0]  # type: ignore[attr-defined]
        if getattr(node, "decorator_list", None):  # its first line is that of a decorator
            text = line[: len(line) - len(line.lstrip(" \t\f"))]
        # A form feed sets the column back to 0: only what follows it is indentation.
        indent = text[len(text.rstrip(" \t")) :]
        return text, indent.encode("ascii")

    def after(self, node: ast.AST) -> str:
        """What stands behind a node on its last line."""
        line = self.text_lines[node.end_lineno - 1]  # type: ignore[attr-defined]
        return _cut(line, node.end_col_offset)[1]  # type: ignore[attr-defined]


def encoding_of(lines: Sequence[bytes]) -> str:
    """The encoding that Python reads a source in ("utf-8-sig" with a byte order mark). SyntaxError if unknown."""
    waiting = iter(lines)
    return tokenize.detect_encoding(lambda: next(waiting, b""))[0]


def split_lines(data: bytes) -> List[bytes]:
    """Physical lines, each with its line end."""
    return data.splitlines(keepends=True)


def parse(data: bytes, path: str) -> ast.Module:
    """``ast.parse`` without the warnings that somebody else's file may cause."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(data, path)


# -- finding a place ---------------------------------------------------------------------------------------------------


def find_place(source: Source, anchor: Dict[str, Any]) -> Place:
    """The place that an anchor names.

    Raises NoMatch, in words that complete "anchor X: ...", when the anchor does not match exactly once or when code
    there could not be reached or would share its line with other code.
    """
    nodes = find_nodes(source, anchor)
    name = describe(anchor)
    if len(nodes) != 1:
        lines = ", ".join(str(_first_line(node)) for node in nodes[:5])
        raise NoMatch("matches {} times (lines {})".format(len(nodes), lines))
    node, position = nodes[0], anchor["position"]
    if position == "before":
        return _place_before(source, node, name)
    if position == "after":
        return _place_after(source, node, node, name)
    body = getattr(node, "body", None)
    if not isinstance(body, list) or not all(isinstance(item, ast.stmt) for item in body):
        raise NoMatch("has no body to put lines at the {} of".format(position))
    if not body:  # an empty module
        return Place(len(source.data), b"", source.eol_at(len(source.data)), name)
    if position == "start":
        rest = body[_leading(node) :]
        return _place_before(source, rest[0], name) if rest else _place_after(source, body[-1], body[0], name)
    if isinstance(node, _FUNCTIONS) and not anchor.get("early_return", False):
        early = [item.lineno for item in walk_statements(body) if isinstance(item, ast.Return)]
        if early:
            raise NoMatch("returns at line {}, so lines at its end would not always run".format(early[0]))
    return _place_after(source, body[-1], body[0], name)


def find_nodes(source: Source, anchor: Dict[str, Any]) -> List[ast.AST]:
    """Every node that an anchor (or a condition: an anchor without a position) matches.

    Raises NoMatch when a class or function on the way stands there not at all or more than once.
    """
    scope: Any = source.tree
    for key, kinds in (("class", (ast.ClassDef,)), ("function", _FUNCTIONS)):
        for name in anchor[key].split(".") if anchor.get(key) else []:
            found: List[Any] = [
                item for item in source.statements(scope) if isinstance(item, kinds) and item.name == name
            ]
            if len(found) != 1:
                lines = " (lines {})".format(", ".join(str(item.lineno) for item in found)) if found else ""
                raise NoMatch("{} {} stands there {} times{}".format(key, name, len(found), lines))
            scope = found[0]
    if not anchor.get("statement"):
        return [scope]
    pattern = parse_pattern(anchor["statement"])
    matching = [item for item in source.statements(scope) if _matches(pattern, item)]
    if not matching:
        raise NoMatch("no such statement")
    return list(matching)


def describe(anchor: Dict[str, Any]) -> str:
    """An anchor in words: "end of DeepseekV2Model.__init__"."""
    scope = ".".join(str(anchor[key]) for key in ("class", "function") if anchor.get(key)) or "the module"
    statement = "`{}` in ".format(anchor["statement"]) if anchor.get("statement") else ""
    position = anchor.get("position")
    joint = {"before": "before ", "after": "after ", "start": "start of ", "end": "end of "}.get(str(position), "")
    return joint + statement + scope


def walk_statements(body: Sequence[Any]) -> Iterator[ast.stmt]:
    """The statements of one scope in order: into blocks of any depth, not into functions and classes."""
    for item in body:
        if isinstance(item, ast.stmt):
            yield item
        if not isinstance(item, _DEFS):
            for field in _BODIES:
                inner = getattr(item, field, None)
                if inner:
                    yield from walk_statements(inner)


def _place_before(source: Source, node: ast.AST, name: str) -> Place:
    text, indent = source.before(node)
    if text.strip(" \t\f"):
        raise NoMatch("shares line {} with other code".format(_first_line(node)))
    offset = source.offsets[_first_line(node) - 1]
    if offset == 0 and source.data.startswith(BOM):
        offset = len(BOM)
    return Place(offset, indent, source.eol_at(offset), "{}, before line {}".format(name, _first_line(node)))


def _place_after(source: Source, node: ast.AST, first: ast.AST, name: str) -> Place:
    if isinstance(node, _LEAVES):
        raise NoMatch("line {} leaves the block, lines after it would never run".format(_first_line(node)))
    text, indent = source.before(first)
    if text.strip(" \t\f"):
        raise NoMatch("shares line {} with other code".format(_first_line(first)))
    last = node.end_lineno  # type: ignore[attr-defined]
    rest = source.after(node).strip().lstrip(";").lstrip()
    if rest and not rest.startswith("#"):
        raise NoMatch("shares line {} with other code".format(last))
    return Place(
        source.offsets[last], indent, source.eol_at(source.offsets[last]), "{}, after line {}".format(name, last)
    )


def _leading(node: Any) -> int:
    """How many statements have to stay first in a body: the docstring, and a module's ``from __future__`` lines."""
    count = 0
    if isinstance(node, (ast.Module, *_DEFS)) and node.body and ast.get_docstring(node, clean=False) is not None:
        count = 1
    if isinstance(node, ast.Module):
        for index, item in enumerate(node.body):
            if isinstance(item, ast.ImportFrom) and item.module == "__future__":
                count = index + 1
    return count


def _first_line(node: Any) -> int:
    decorators = getattr(node, "decorator_list", None) or []
    return min([node.lineno, *(item.lineno for item in decorators)]) if hasattr(node, "lineno") else 1


def _cut(line: str, utf8_column: int) -> Tuple[str, str]:
    """Cut a line at a column of the syntax tree, which counts bytes of UTF-8 whatever the file's encoding is."""
    data = line.encode("utf-8", "surrogatepass")
    return data[:utf8_column].decode("utf-8", "surrogatepass"), data[utf8_column:].decode("utf-8", "surrogatepass")


# -- statement patterns ------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def parse_pattern(text: str) -> ast.stmt:
    """A pattern is one Python statement; ``...`` in it stands for any expression, or any number of them in a list.

    Of a statement with a body only the head is written, up to its colon. Raises ValueError.
    """
    code = text.strip()
    try:
        body = ast.parse(code + " pass" if code.endswith(":") else code).body
    except SyntaxError as error:
        raise ValueError("not a Python statement: {}".format(_brief(error))) from error
    if len(body) != 1:
        raise ValueError("not one statement")
    if isinstance(body[0], ast.Expr) and _any(body[0].value):
        raise ValueError("`...` alone matches everything")
    return body[0]


def _any(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def _matches(pattern: Any, node: Any) -> bool:
    if _any(pattern):
        return isinstance(node, ast.expr)
    if isinstance(pattern, ast.AST):
        if type(pattern) is not type(node):
            return False
        if isinstance(pattern, _DEFS):  # `def f():` is any function f, whatever its parameters
            return bool(pattern.name == getattr(node, "name", None))
        for field in pattern._fields:
            if field in (_NOT_COMPARED if isinstance(pattern, ast.stmt) else _NEVER_COMPARED):
                continue
            expected, got = getattr(pattern, field, None), getattr(node, field, None)
            if field == "keywords" and any(_any(item) for item in getattr(pattern, "args", [])):
                if not all(any(_matches(one, other) for other in got or []) for one in expected or []):
                    return False
            elif not _matches(expected, got):
                return False
        return True
    if isinstance(pattern, list):
        return isinstance(node, list) and _matches_list(pattern, node)
    return type(pattern) is type(node) and bool(pattern == node)


def _matches_list(patterns: List[Any], nodes: List[Any]) -> bool:
    if not patterns:
        return not nodes
    if _any(patterns[0]):
        return any(_matches_list(patterns[1:], nodes[skip:]) for skip in range(len(nodes) + 1))
    return bool(nodes) and _matches(patterns[0], nodes[0]) and _matches_list(patterns[1:], nodes[1:])


# -- the proof that an edit only inserted ------------------------------------------------------------------------------


def same_but_inserted(before: ast.AST, after: ast.AST, inserted: Sequence[Tuple[int, int]]) -> bool:
    """Whether ``after`` is ``before`` plus statements on the ``inserted`` lines (first, last), and nothing else.

    The bytes off those lines must be known to be the same.
    """
    waiting: List[Tuple[Any, Any]] = [(before, after)]
    while waiting:
        old, new = waiting.pop()
        if old is new:  # most contexts and operators are one object for all trees
            continue
        if type(old) is not type(new):
            return False
        if isinstance(old, ast.AST):
            for field in old._fields:
                waiting.append((getattr(old, field, None), getattr(new, field, None)))
        elif isinstance(old, list):
            if new and isinstance(new[0], ast.stmt):
                new = [item for item in new if not _lies_in(item, inserted)]
            if len(old) != len(new):
                return False
            waiting.extend(pair for pair in zip(old, new) if not _only_moved(*pair, inserted))
        elif old != new and old == old:  # a NaN is unlike itself
            return False
    return True


def _only_moved(old: Any, new: Any, inserted: Sequence[Tuple[int, int]]) -> bool:
    """Whether a statement at the left margin has moved down by the lines inserted above it, whole: then it is the same text, so the same tree.

    One with an inserted line in it ends further down than that.
    """
    if not isinstance(new, ast.stmt) or type(old) is not type(new) or old.col_offset or new.col_offset:
        return False
    first = min([new.lineno] + [each.lineno for each in getattr(new, "decorator_list", [])])
    moved = sum(end - begin + 1 for begin, end in inserted if end < first)
    where = (new.lineno, new.end_lineno, new.end_col_offset)
    return where == (old.lineno + moved, (old.end_lineno or 0) + moved, old.end_col_offset)


def touched(tree: ast.Module, inserted: Sequence[Tuple[int, int]]) -> ast.Module:
    """The statements at the left margin that hold one of the ``inserted`` lines (first, last), beneath what __future__ asks of the compiler.

    What a compiler has to say beside the grammar (a ``return`` outside a function, a ``nonlocal`` of nothing, a __future__ behind other code)
    it says of one such statement; the others compile as they did before the insertion.
    """
    kept = [
        item
        for item in tree.body
        if (isinstance(item, ast.ImportFrom) and item.module == "__future__")
        or any(_first_line(item) <= last and first <= (item.end_lineno or 0) for first, last in inserted)
    ]
    return ast.Module(body=kept, type_ignores=[])


def _lies_in(node: Any, ranges: Sequence[Tuple[int, int]]) -> bool:
    if not isinstance(node, ast.stmt):
        return False
    return any(first <= node.lineno and (node.end_lineno or node.lineno) <= last for first, last in ranges)


def comment_lines(source_text: str) -> Optional[List[int]]:
    """The lines (from 1) that hold a comment, or None when the text cannot be cut into tokens."""
    waiting = iter(re.findall(r"[^\n]*\n|[^\n]+\Z", re.sub(r"\r\n|\r", "\n", source_text)))
    try:
        return [
            token.start[0]
            for token in tokenize.generate_tokens(lambda: next(waiting, ""))
            if token.type == tokenize.COMMENT
        ]
    except (tokenize.TokenError, SyntaxError, ValueError):
        return None


def code_troubles(lines: List[str], where: str) -> Iterator[str]:
    """Why these lines cannot be inserted as code, if so."""
    try:
        tree = ast.parse("\n".join(lines) + "\n")
    except SyntaxError as error:
        yield "{}: the lines are not Python: {}".format(where, _brief(error))
        return
    for node in ast.walk(tree):
        text = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
        )
        if text and node.end_lineno != node.lineno:  # type: ignore[attr-defined]
            # Indenting the lines would change what is in it.
            yield "{}: a text goes over several lines".format(where)


def _brief(error: BaseException) -> str:
    text = getattr(error, "msg", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")


def _python() -> str:
    return "{}.{}.{}".format(*sys.version_info[:3])
