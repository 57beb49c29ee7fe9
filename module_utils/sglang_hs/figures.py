"""Distributions and rates of a run, small whatever its size: for the report. Pure functions of numbers that are read one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

MOST_BINS = 32
MOST_POINTS = 160  # of a curve
FEWEST_LINES = 3  # of history.jsonl, or there is no curve to speak of
FINE = 64  # bins of an octave in which norms are counted: within 1.1 % of the value


def nice(step: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``step``."""
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step * (1 - 1e-9))


def quantiles(counted: Sequence[Tuple[float, int]], shares: Sequence[float]) -> List[float]:
    """The values that these shares of all do not exceed. ``counted``: (value, how many), ascending."""
    total = sum(count for _, count in counted)
    found: List[float] = []
    for share in shares:
        wanted, seen = max(math.ceil(share * total), 1), 0
        for value, count in counted:
            seen += count
            if seen >= wanted:
                found.append(value)
                break
    return found


def lengths(counted: Sequence[Tuple[int, int]]) -> Dict[str, Any]:
    """Of samples: (tokens, how many), ascending. {count, tokens, min, max, mean, p50, p95, p99, scale, bins: [{from, to, count}]}.

    Bins hold ``from`` <= tokens < ``to``: equally wide, or half octaves (scale ``log``) where most samples are far shorter than the longest.
    """
    total = sum(count for _, count in counted)
    if not total:
        return {"count": 0, "bins": []}
    tokens = sum(length * count for length, count in counted)
    low, high = counted[0][0], counted[-1][0]
    p50, p95, p99 = quantiles(counted, (0.5, 0.95, 0.99))
    log = high > 8 * max(p50, 1)
    if log:
        first = math.floor(2 * math.log2(max(low, 1)))
        edges = [math.ceil(2 ** (place / 2)) for place in range(first, math.floor(2 * math.log2(high)) + 2)]
        edges = sorted(set(edges))
        if edges[-1] <= high:
            edges.append(high + 1)
        edges[0] = min(edges[0], low)
    else:
        width = max(int(nice((high + 1 - low) / MOST_BINS)), 1)
        first = low // width * width
        edges = list(range(first, high + width + 1, width))
    counts = [0] * (len(edges) - 1)
    place = 0
    for length, count in counted:
        while length >= edges[place + 1]:
            place += 1
        counts[place] += count
    return {
        "count": total, "tokens": tokens, "min": low, "max": high, "mean": round(tokens / total, 1),
        "p50": p50, "p95": p95, "p99": p99, "scale": "log" if log else "linear",
        "bins": [{"from": a, "to": b, "count": n} for a, b, n in zip(edges, edges[1:], counts)],
    }  # fmt: skip


def norms(samples: Iterable[Sequence[float]], names: Sequence[str]) -> List[Dict[str, Any]]:
    """One entry a state: {name, count, min, max, mean, p01, p50, p99, bins: [{from, to, count}]}; quantiles within 1.1 %.

    ``samples``: of each its norms, a number a state. Memory does not grow with their number. Bins rise by equal factors.
    """
    fine: List[Dict[int, int]] = [{} for _ in names]
    sums, lows, highs = [0.0] * len(names), [math.inf] * len(names), [0.0] * len(names)
    for values in samples:
        for slot, value in enumerate(values[: len(names)]):
            if not 0 < value < math.inf:
                continue
            place = math.floor(math.log2(value) * FINE)
            fine[slot][place] = fine[slot].get(place, 0) + 1
            sums[slot] += value
            lows[slot] = min(lows[slot], value)
            highs[slot] = max(highs[slot], value)
    found = []
    for slot, name in enumerate(names):
        count = sum(fine[slot].values())
        if not count:
            found.append({"name": name, "count": 0, "bins": []})
            continue
        places = sorted(fine[slot])
        group = max(math.ceil((places[-1] - places[0] + 1) / MOST_BINS), 1)
        bins: Dict[int, int] = {}
        for place in places:
            bins[place // group] = bins.get(place // group, 0) + fine[slot][place]
        middle = [(2 ** ((place + 0.5) / FINE), fine[slot][place]) for place in places]
        p01, p50, p99 = (min(max(value, lows[slot]), highs[slot]) for value in quantiles(middle, (0.01, 0.5, 0.99)))
        found.append({
            "name": name, "count": count, "min": rounded(lows[slot]), "max": rounded(highs[slot]),
            "mean": rounded(sums[slot] / count), "p01": rounded(p01), "p50": rounded(p50), "p99": rounded(p99),
            "bins": [
                {"from": rounded(2 ** (key * group / FINE)), "to": rounded(2 ** ((key + 1) * group / FINE)), "count": bins.get(key, 0)}
                for key in range(min(bins), max(bins) + 1)
            ],
        })  # fmt: skip
    return found


def rounded(value: float) -> float:
    """Five significant digits."""
    return float("{:.5g}".format(value))


def history(path: Path) -> Iterator[Dict[str, Any]]:
    """The lines of history.jsonl; a torn last one, and what is none, is left out. Nothing where there is no file."""
    try:
        with path.open(encoding="utf-8", errors="replace") as handle:
            for line in handle:
                try:
                    found = json.loads(line)
                    float(found["at"])
                except (ValueError, KeyError, TypeError):
                    continue
                yield found
    except OSError:
        return


def curve(path: Path, most: int = MOST_POINTS) -> Dict[str, Any]:
    """Rates while the data set was extracted. {missing: why there is none, points: [{from, to, tokens_per_s, bytes_per_s}], peak_*, mean_*}.

    Times are unix times. A point is the mean over its time, so the area under the curve is what was done; where counts fall back
    (a client that was started again and found less in place) a new stretch begins.
    """
    marks = [
        (float(line["at"]), int(line.get("tokens") or 0), int(line.get("bytes") or 0))
        for line in history(path)
        if line.get("phase") in ("extract", "finish")
    ]
    if len(marks) < FEWEST_LINES:
        seen = (
            "{} was not written".format(path.name)
            if not path.is_file()
            else "it was over in {} marks".format(len(marks))
        )
        return {"missing": seen, "points": []}
    least = max((marks[-1][0] - marks[0][0]) / most, 0.2)  # seconds a point
    points: List[Dict[str, float]] = []
    begin: Optional[Tuple[float, int, int]] = None
    for index, mark in enumerate(marks):
        if begin is None or mark[1] < begin[1] or mark[2] < begin[2]:
            begin = mark
            continue
        seconds = mark[0] - begin[0]
        if seconds <= 0 or (seconds < least and index < len(marks) - 1):
            continue
        points.append({
            "from": round(begin[0], 2), "to": round(mark[0], 2),
            "tokens_per_s": round((mark[1] - begin[1]) / seconds, 1), "bytes_per_s": round((mark[2] - begin[2]) / seconds),
        })  # fmt: skip
        begin = mark
    result: Dict[str, Any] = {"missing": None if points else "no time passed", "points": points}
    for key in ("tokens_per_s", "bytes_per_s"):
        spent = sum(point["to"] - point["from"] for point in points)
        done = sum(point[key] * (point["to"] - point["from"]) for point in points)
        result["peak_" + key] = max((point[key] for point in points), default=None)
        result["mean_" + key] = round(done / spent, 1) if spent else None
    return result
