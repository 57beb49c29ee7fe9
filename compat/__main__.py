"""``python -m compat [RELEASE...]``, in the engine's Python: the table, docs/compatibility.md (of a whole run), the count.

Exit status 1 if the edit is not right on one of the releases.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import List, Sequence

from . import edit, execute, tiny, wheels

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "compatibility.md"
COLUMNS = ("release", "layout", "variant", "anchors", "line", "states", "worst", "own capture", "undo")


@dataclass
class Row:
    """One release. trouble: why it does not count, in words; empty where all is right."""

    release: str
    layout: str = "-"
    variant: str = "-"
    anchors: str = "-"
    line: str = "-"
    states: str = "-"
    worst: str = "-"
    own: str = "-"
    undo: str = "-"
    trouble: str = ""

    def cells(self) -> List[str]:
        """As COLUMNS."""
        head = [self.release, self.layout, self.variant, self.anchors, self.line]
        return [*head, self.states, self.worst, self.own, self.undo]


def releases() -> List[str]:
    """Those of releases.txt, oldest first."""
    lines = (HERE / "releases.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def look(release: str, root: Path) -> Row:
    """Edit the release's file, run it unedited and edited, undo."""
    row = Row(release)
    original = root / wheels.DEEPSEEK
    with tempfile.TemporaryDirectory() as scratch:
        try:
            edited = edit.Edited(original.read_bytes(), Path(scratch))
        except edit.EditRefused as error:
            row.trouble = str(error)
            return row
        row.variant = str(edited.variant["name"])
        row.line = str(edited.plan.insertions[0]["line"])
        row.anchors = str(len(edited.variant["requires"]) + len(edited.variant["edits"]))
        if not edited.again():
            row.trouble = "a second apply changes the file"
        found = execute.in_child(release, root, original, edited.path)
        row.undo = "exact" if edited.undo() else "DIFFERS"
    row.layout = found.get("layout", "-")
    row.own = found.get("own", "-")
    if "states" in found:
        row.states, row.worst = str(found["states"]), "{:.1e}".format(found["worst"])
    row.trouble = row.trouble or found.get("error", "") or found.get("refused", "")
    if not row.trouble and row.layout != row.variant:
        row.trouble = "the edit takes it for layout {}, the capture for {}".format(row.variant, row.layout)
    if not row.trouble and row.undo != "exact":
        row.trouble = "the undo does not give the original back"
    return row


def text(rows: Sequence[Row]) -> str:
    """The table for a terminal, and what is wrong below it."""
    lines = [list(COLUMNS), *(row.cells() for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join(table + ["{}: {}".format(row.release, row.trouble) for row in rows if row.trouble])


def page(rows: Sequence[Row]) -> str:
    """docs/compatibility.md. Nothing in it changes from run to run unless a result does."""
    good = sum(not row.trouble for row in rows)
    lines = [
        "# Releases of SGLang that the edit was run on",
        "",
        "Written by `make compat`; not by hand. Right on **{} of {}** releases.".format(good, len(rows)),
        "",
        "For each release its wheel is taken from PyPI, its `deepseek_v2.py` edited by the functions that `source_patch` calls, compiled, and edited",
        "again (which must change nothing). Then the release's *own* code is run from the edited file, and from the unedited one: `__init__` and `forward` of",
        "`DeepseekV2Model`, `forward` of its decoder layer, its layer communicator (A to C) or stage boundaries and residual stream (D), its containers for",
        "captured states. What would need a GPU or weights is small and known: embedding, norms, attention and MLP of a model of {} layers, whose".format(
            tiny.LAYERS
        ),
        "residual sums are whole numbers. A name that a release uses and nobody supplies is an error (`compat/standins.py`).",
        "",
        "- **layout** is what the capture found in the running model, **variant** what the edit found in the source; they must agree.",
        "- **anchors**: places in the source that the variant needs, each found exactly once. **line**: of the inserted block.",
        "- **states**: captured vectors compared, of {} sequences in one forward, given by ids and by embeddings: every boundary, the".format(
            len(tiny.SEQUENCES)
        ),
        "  pre-norm and the post-norm final state. **worst**: largest difference; boundaries and pre-norm state must be equal, so it is the",
        "  post-norm state's, in float32.",
        "- **own capture**: with `layers_to_capture` set, the model's own states were compared too, in value and order. In every case `forward` of the edited",
        "  source returned what that of the unedited one returns, with the capture attached and without its environment variable.",
        "- **undo**: bytes and modification time are the original's.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
    ]
    for row in rows:
        if row.trouble:
            lines += ["{}: {}".format(row.release, " ".join(row.trouble.split())), ""]
    lines += [
        "Not run here: kernels, quantisation, more than one process. Those of the tensor-parallel path are in the end-to-end tests, on the newest release.",
        "",
    ]
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    """``words``: releases, or none for all of releases.txt."""
    names = list(words) or releases()
    folders = wheels.get(names)
    rows = [look(name, folders[name]) for name in names]
    print(text(rows))
    if not words:
        PAGE.write_text(page(rows), encoding="utf-8")
    good = sum(not row.trouble for row in rows)
    print("compat: {} of {} releases".format(good, len(rows)))
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
