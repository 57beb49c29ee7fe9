"""Charts of a run's report: HTML and SVG that need no script, no font and no file, and say in data- attributes what they draw.

The drawing stretches with the page (``preserveAspectRatio="none"``), its texts are HTML beside it and keep their size: so a chart can
be read on a telephone and on paper. Times are unix times, told by the clock of the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Callable

from markupsafe import Markup

WIDE = 1000.0  # of a drawing's own coordinates
HIGH = 100.0
NARROWEST = 3.0  # of a bar on the time line, so that a step of a second is seen in a run of hours


# -- numbers as text ---------------------------------------------------------------------------------------------------------------


def count(value: Any) -> str:
    """12,345; a dash where there is none."""
    return "–" if value is None else f"{value:,.0f}"


def figure(value: Any) -> str:
    """Three significant digits, in powers of ten where it is very small: 0.000123, 1.9e-06, 1,234."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def short(value: float) -> str:
    """For an axis: 950, 1.2k, 35M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def size(value: Any) -> str:
    """Bytes in powers of ten: 40.6 MB."""
    if value is None:
        return "–"
    for unit, letters in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:.3g} {letters}" if value < 1000 * unit else f"{value / unit:,.0f} {letters}"
    return f"{value:.0f} B"


def span(seconds: Any) -> str:
    """A length of time: 850 ms, 44.6 s, 12 min 05 s, 6 h 30 min."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    whole = round(whole / 60)
    return f"{whole // 60:,} h {whole % 60:02d} min"


def clock(stamp: Any, offset: int = 0, date: bool = False) -> str:
    """A unix time by a clock that is ``offset`` seconds before UTC's; with the date and the offset where asked for."""
    if stamp is None:
        return "–"
    there = time.gmtime(stamp + offset)
    if not date:
        return time.strftime("%H:%M:%S", there)
    sign, minutes = "+" if offset >= 0 else "−", abs(offset) // 60
    zone = "UTC" if not minutes else f"UTC{sign}{minutes // 60:02d}:{minutes % 60:02d}"
    return time.strftime("%Y-%m-%d %H:%M:%S ", there) + zone


# -- scales ------------------------------------------------------------------------------------------------------------------------


def nice(step: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``step``."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, ``most`` of them at most."""
    if high <= low:
        return [low]
    step = nice((high - low) / most)
    first = math.ceil(low / step - 1e-9)
    found = [step * place for place in range(first, math.floor(high / step + 1e-9) + 1)]
    return [float(f"{value:.12g}") for value in found]


def log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers for a logarithmic axis: powers of ten, with 2 and 5 between them where there is room; else of a linear one."""
    for steps in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [factor * 10.0**power for power in powers for factor in steps]
        found = [float(f"{value:.12g}") for value in found if low <= value <= high]
        if len(found) < 3:
            return ticks(low, high, most - 1)
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def clock_ticks(begin: float, end: float, offset: int, most: int = 5) -> list[tuple[float, str]]:
    """(unix time, text) at round times of the host's clock."""
    for step in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400):
        if (end - begin) / step <= most:
            break
    else:
        step = math.ceil((end - begin) / most / 86400) * 86400
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%m-%d"
    if step < 86400 < end - begin:
        form = "%m-%d %H:%M"
    first = math.ceil((begin + offset) / step) * step
    stamps = range(first, math.floor(end + offset) + 1, step)
    return [(stamp - offset, time.strftime(form, time.gmtime(stamp))) for stamp in stamps]


# -- pieces ------------------------------------------------------------------------------------------------------------------------


def _svg(inner: Iterable[Markup], label: str) -> Markup:
    return Markup(
        '<svg viewBox="0 0 {:.0f} {:.0f}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(WIDE, HIGH, label, Markup("").join(inner))


def _rect(x: float, y: float, width: float, height: float, kind: str, title: str, **data: Any) -> Markup:
    told = Markup("").join(Markup(' data-{}="{}"').format(name, value) for name, value in data.items())
    return Markup(
        '<rect class="{}" x="{:.3f}" y="{:.3f}" width="{:.3f}" height="{:.3f}"{}><title>{}</title></rect>'
    ).format(kind, x, y, max(width, 0), max(height, 0), told, title)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line class="{}" x1="{:.3f}" y1="{:.3f}" x2="{:.3f}" y2="{:.3f}"/>').format(kind, x1, y1, x2, y2)


def _x_labels(places: Sequence[tuple[float, str]]) -> Markup:
    """Texts below a drawing at ``places`` (share of the width, text); those at the ends stay inside, each second one may go on a narrow page."""
    said = []
    for index, (share, text) in enumerate(places):
        side = "first" if share < 0.06 else "last" if share > 0.94 else ""
        odd = " odd" if len(places) > 4 and index % 2 else ""
        said.append(Markup('<span class="{}{}" style="left:{:.2f}%">{}</span>').format(side, odd, 100 * share, text))
    return Markup('<div class="x">{}</div>').format(Markup("").join(said))


def _y_labels(places: Sequence[tuple[float, str]]) -> Markup:
    """Texts beside a drawing at ``places`` (share of the height from below, text)."""
    said = [Markup('<span style="bottom:{:.2f}%">{}</span>').format(100 * share, text) for share, text in places]
    return Markup('<div class="y">{}</div>').format(Markup("").join(said))


def _chart(kind: str, ys: Markup, drawing: Markup, xs: Markup, y_title: str, x_title: str) -> Markup:
    return Markup(
        '<div class="chart {}"><p class="title">{}</p><div class="frame">{}<div class="plot">{}</div>{}</div><p class="xtitle">{}</p></div>'
    ).format(kind, y_title, ys, drawing, xs, x_title)


def _top(highest: float, whole: bool) -> tuple[float, list[float]]:
    """Where a vertical axis that begins at 0 ends, and its ticks."""
    if highest <= 0:
        return 1.0, [0.0]
    marks = ticks(0, highest, 4)
    step = marks[1] - marks[0] if len(marks) > 1 else nice(highest)
    if whole and step < 1:
        step = 1.0
    top = math.ceil(highest / step - 1e-9) * step
    return top, [step * place for place in range(round(top / step) + 1)]


# -- the charts --------------------------------------------------------------------------------------------------------------------


def bars(bins: Sequence[Mapping[str, Any]], scale: str, y_title: str, x_title: str, kind: str) -> Markup:
    """A histogram of bins {from, to, count}; ``scale`` of the horizontal axis: linear or log."""
    if not bins:
        return Markup("")
    log = scale == "log"
    low, high = float(bins[0]["from"]), float(bins[-1]["to"])
    low = max(low, 0.5) if log else low

    def place(value: float) -> float:
        if log:
            return math.log(max(value, low) / low) / math.log(high / low)
        return (value - low) / (high - low)

    top, marks = _top(max(entry["count"] for entry in bins), True)
    inner = [_line(0, HIGH * (1 - mark / top), WIDE, HIGH * (1 - mark / top), "grid") for mark in marks]
    for entry in bins:
        left, right = WIDE * place(entry["from"]), WIDE * place(entry["to"])
        gap = min(2.0, 0.15 * (right - left))
        height = HIGH * entry["count"] / top
        title = f"{short_edge(entry['from'])} to {short_edge(entry['to'])}: {entry['count']:,}"
        data = {"from": entry["from"], "to": entry["to"], "count": entry["count"]}
        inner.append(_rect(left + gap / 2, HIGH - height, right - left - gap, height, "bar", title, **data))
    below = log_ticks(low, high) if log else ticks(low, high, 6)
    xs = _x_labels([(place(value), short(value)) for value in below])
    return _chart(
        kind, _y_labels([(mark / top, short(mark)) for mark in marks]), _svg(inner, y_title), xs, y_title, x_title
    )


def short_edge(value: float) -> str:
    """A bin's edge."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def rate(points: Sequence[Mapping[str, Any]], key: str, mean: float, unit: str, offset: int) -> Markup:
    """A rate over time: a bar for each stretch {from, to, KEY}, with its mean. unit: tokens/s or GB/s (KEY is then in bytes a second)."""
    if not points:
        return Markup("")
    factor = 1e9 if unit == "GB/s" else 1e6 if unit == "MB/s" else 1.0
    begin, end = points[0]["from"], points[-1]["to"]
    width = max(end - begin, 1e-9)
    top, marks = _top(max(point[key] for point in points) / factor, False)
    inner = [_line(0, HIGH * (1 - mark / top), WIDE, HIGH * (1 - mark / top), "grid") for mark in marks]
    for point in points:
        left, right = (WIDE * (point[name] - begin) / width for name in ("from", "to"))
        height = HIGH * point[key] / factor / top
        title = f"{clock(point['from'], offset)} to {clock(point['to'], offset)}: {figure(point[key] / factor)} {unit}"
        data = {"from": point["from"], "to": point["to"], "value": point[key]}
        inner.append(_rect(left, HIGH - height, right - left, height, "step", title, **data))
    middle = HIGH * (1 - mean / factor / top)
    inner.append(_line(0, middle, WIDE, middle, "mean"))
    xs = _x_labels([((stamp - begin) / width, text) for stamp, text in clock_ticks(begin, end, offset)])
    ys = _y_labels([(mark / top, short(mark)) for mark in marks])
    title = f"{unit} (mean {figure(mean / factor)}, dashed)"
    return _chart("rate", ys, _svg(inner, title), xs, title, "")


def strips(states: Sequence[Mapping[str, Any]]) -> Markup:
    """One histogram a state {name, count, min, p50, max, bins}, below each other, over one logarithmic axis."""
    drawn = [state for state in states if state["count"]]
    if not drawn:
        return Markup("")
    low = min(state["bins"][0]["from"] for state in drawn)
    high = max(state["bins"][-1]["to"] for state in drawn)
    below = log_ticks(low, high)

    def place(value: float) -> float:
        return math.log(value / low) / math.log(high / low)

    rows = []
    for state in drawn:
        most = max(entry["count"] for entry in state["bins"])
        inner = [_line(WIDE * place(value), 0, WIDE * place(value), HIGH, "grid") for value in below]
        for entry in state["bins"]:
            left, right = WIDE * place(entry["from"]), WIDE * place(entry["to"])
            height = (HIGH - 4) * entry["count"] / most
            title = f"{figure(entry['from'])} to {figure(entry['to'])}: {entry['count']:,}"
            data = {"from": entry["from"], "to": entry["to"], "count": entry["count"]}
            inner.append(_rect(left, HIGH - height, right - left, height, "bar", title, **data))
        inner.append(_line(0, HIGH, WIDE, HIGH, "base"))
        told = f"median {figure(state['p50'])}, {figure(state['min'])} to {figure(state['max'])}"
        rows.append(
            Markup('<div class="strip"><b>{}</b><div class="plot">{}</div><span class="told">{}</span></div>').format(
                state["name"], _svg(inner, str(state["name"])), told
            )
        )
    axis = Markup('<div class="strip axis"><b></b>{}<span class="told"></span></div>').format(
        _x_labels([(place(value), short(value)) for value in below])
    )
    return Markup('<div class="strips">{}{}</div>').format(Markup("").join(rows), axis)


def steps(timeline: Sequence[Mapping[str, Any]], production: Mapping[str, Any], until: float, offset: int) -> Markup:
    """The time line: a row for each step {step, depth, begin, end, state}, production's absence behind all of them and as the first row.

    ``until``: unix time up to which a step without an end is drawn.
    """
    if not timeline:
        return Markup("")
    begin = min(step["begin"] for step in timeline)
    end = max([step["end"] or until for step in timeline] + [begin + 1])
    width = end - begin
    times = clock_ticks(begin, end, offset)
    down = production.get("down_from")
    back = production.get("down_to") or (until if down is not None else None)

    def place(stamp: float) -> float:
        return WIDE * (stamp - begin) / width

    behind = [_line(place(stamp), 0, place(stamp), HIGH, "grid") for stamp, _ in times]
    rows = []
    if down is not None and back is not None:
        data = {"step": "production down", "begin": down, "end": production.get("down_to") or ""}
        told = span(back - down) + ("" if production.get("down_to") else ", not back")
        bar = _rect(
            place(down), 25, max(place(back) - place(down), NARROWEST), 50, "down", f"production down: {told}", **data
        )
        rows.append(_step_row("production down", 0, [*behind, bar], told, "down"))
        shade = place(down), 0, place(back) - place(down), HIGH
        behind.append(_rect(*shade, "shade", f"production down: {told}"))
    for step in timeline:
        last = step["end"] or until
        data = {"step": step["step"], "begin": step["begin"], "end": step["end"] or "", "state": step["state"]}
        kind = {"done": "done", "failed": "failed", "cut": "cut"}.get(step["state"], "open")
        told = span(last - step["begin"]) + {"done": "", "failed": ", failed", "cut": ", cut", "open": ", no end"}[kind]
        left = min(place(step["begin"]), WIDE - NARROWEST)
        title = f"{step['step']}: {clock(step['begin'], offset)} to {clock(step['end'], offset)}, {step['state']}"
        bar = _rect(left, 25, max(place(last) - left, NARROWEST), 50, f"{kind} depth{step['depth']}", title, **data)
        rows.append(_step_row(step["step"], step["depth"], [*behind, bar], told, kind))
    axis = Markup('<div class="row axis"><b></b>{}<span class="told"></span></div>').format(
        _x_labels([(place(stamp) / WIDE, text) for stamp, text in times])
    )
    return Markup('<div class="steps">{}{}</div>').format(Markup("").join(rows), axis)


def _step_row(name: str, depth: int, inner: Sequence[Markup], told: str, kind: str) -> Markup:
    text = name.partition(": ")[2] if depth else name
    return Markup(
        '<div class="row depth{} is-{}"><b>{}</b><div class="plot">{}</div><span class="told">{}</span></div>'
    ).format(depth, kind, text, _svg(inner, name), told)


class FilterModule:
    """hs_chart_*: charts. hs_text_*: numbers as text."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Names of the filters."""
        return {
            "hs_chart_bars": bars,
            "hs_chart_rate": rate,
            "hs_chart_strips": strips,
            "hs_chart_steps": steps,
            "hs_text_count": count,
            "hs_text_figure": figure,
            "hs_text_size": size,
            "hs_text_span": span,
            "hs_text_clock": clock,
        }
