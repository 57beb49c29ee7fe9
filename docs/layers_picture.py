"""The picture of docs/layers.md: one model of 61 layers, and what each tool calls the places between them. Plain SVG, no library."""

from __future__ import annotations

from typing import Optional

LAYERS = 61
CHOSEN = (3, 31, 59)  # hs_boundaries of the inventory of the real host
COLUMNS = (
    ("hs_boundaries", "this project"),
    ("output of layer", "EAGLE-3, SpecForge, ModelOpt"),
    ("layers_to_capture", "SGLang, the model's own list"),
    ("set_eagle3_...(ids)", "SGLang up to 0.5.12"),
    ("set_eagle3_...(ids)", "SGLang from 0.5.13"),
    ("target_layer_ids", "speculators, vLLM"),
    ("hidden_states[...]", "Hugging Face"),
)
WIDTH, LEFT, COLUMN, ROW, TOP = 1190, 250, 132, 30, 70


def numbers(boundary: int) -> tuple[Optional[int], ...]:
    """One boundary in the numbering of each of COLUMNS; None where that tool has no number for it.

    manifest.json says the same (sglang_hs_client/describe.py); a test compares them.
    """
    after = boundary - 1 if boundary else None
    return (boundary, after, boundary, after, boundary, boundary, boundary)


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle", more: str = "") -> str:
    """One line of text; y is its middle."""
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y + size * 0.36:.1f}" font-size="{size}" text-anchor="{anchor}" {more}>{words}</text>'


def box(y: float, words: str, fill: str = "#eef2f7") -> list[str]:
    """A box on the residual stream."""
    return [
        f'<rect x="60" y="{y - 13}" width="130" height="26" rx="4" fill="{fill}" stroke="#55606e"/>',
        text(125, y, words),
    ]


def place(y: float, values: tuple[Optional[object], ...], chosen: bool, note: str = "") -> list[str]:
    """A place between two boxes, and its row of numbers."""
    lines = []
    if chosen:
        lines.append(
            f'<rect x="{LEFT - 50}" y="{y - 13}" width="{WIDTH - LEFT + 40}" height="26" rx="4" fill="#fff3cd"/>'
        )
    lines.append(f'<circle cx="125" cy="{y}" r="5" fill="{"#c77700" if chosen else "#ffffff"}" stroke="#55606e"/>')
    lines.append(f'<line x1="131" y1="{y}" x2="{LEFT - 50}" y2="{y}" stroke="#b5bcc6" stroke-dasharray="2 3"/>')
    for number, value in enumerate(values):
        shown = "-" if value is None else str(value)
        lines.append(text(LEFT + COLUMN * (number + 0.5), y, shown, more='font-weight="bold"' if chosen else ""))
    if note:
        lines.append(text(LEFT + COLUMN * 1.2, y, note, 12, "start"))
    return lines


def picture() -> str:
    """The whole SVG."""
    body: list[str] = []
    y = float(TOP + ROW)

    def down() -> float:
        nonlocal y
        y += ROW
        return y

    body += box(y, "embedding", "#e3f0e3")
    after: Optional[int] = None
    for boundary in (0, 1, 2, 3, 31, 59, 60):
        if after is not None and boundary != after + 1:
            body.append(text(125, down(), "...", 16))
            body += box(down(), f"layer {boundary - 1}")
        body += place(down(), numbers(boundary), boundary in CHOSEN)
        body += box(down(), f"layer {boundary}")
        after = boundary
    body += place(down(), ("final", LAYERS - 1, None, None, None, LAYERS, None), True, "")
    pre = y
    body += box(down(), "norm", "#e3f0e3")
    body += place(down(), ("final", None, None, None, None, None, LAYERS), False)
    post = y
    body += box(down(), "lm_head", "#e3f0e3")
    height = y + 40
    stream = f'<line x1="125" y1="{TOP + ROW}" x2="125" y2="{y}" stroke="#55606e" stroke-width="2"/>'
    head = [
        text(125, 26, "residual stream", 13, more='font-weight="bold"'),
        text(125, 46, "of 61 layers, top to bottom", 11, more='fill="#55606e"'),
    ]
    for number, (name, whose) in enumerate(COLUMNS):
        middle = LEFT + COLUMN * (number + 0.5)
        head.append(text(middle, 26, name, 11, more='font-weight="bold"'))
        if len(whose) > 21:
            first, _, second = whose.partition(", ")
            head += [
                text(middle, 44, first + ",", 10, more='fill="#55606e"'),
                text(middle, 57, second, 10, more='fill="#55606e"'),
            ]
        else:
            head.append(text(middle, 44, whose, 10, more='fill="#55606e"'))
    labels = [
        text(LEFT - 46, pre, "pre-norm", 11, "start"),
        text(LEFT - 46, post, "post-norm", 11, "start"),
    ]
    foot = text(
        20,
        height - 14,
        "Orange: what is captured with hs_boundaries [3, 31, 59] and the pre-norm final state.",
        11,
        "start",
    )
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" '
                'font-family="DejaVu Sans, Verdana, sans-serif" fill="#1c232b">',
                "<title>Layer numbering</title>",
                f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
                *head,
                stream,
                *body,
                *labels,
                foot,
                "</svg>",
            ]
        )
        + "\n"
    )
