"""Which host extracts which sample: rendezvous hashing with bounded loads in tokens, then a little levelling. Pure: no clock, no chance.

Each sample puts the hosts in an order of its own (rendezvous hashing); it goes to the first of them that has room, the bound being a
little above the mean in tokens. So the same hosts give the same division, and one host more or less moves its own part and little else.
What the bound leaves uneven is levelled by moving a few samples.
"""

from __future__ import annotations

import hashlib
import math
from typing import Dict, Iterable, List, Mapping, Sequence, Tuple

from .errors import HsError

SLACK = 0.005  # of a host's mean: how far the first round fills it above
LEVEL = 0.01  # of a host's mean: what is levelled down and up to
_WORD = (1 << 64) - 1


def _mix(word: int) -> int:
    """A 64-bit word scattered over all of them (the finaliser of splitmix64)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8")).digest()[:8], "big")


def divide(samples: Iterable[Tuple[int, int]], hosts: Mapping[str, float], dataset: str) -> Dict[str, List[int]]:
    """Host -> indices, ascending. ``samples``: (index, tokens); ``hosts``: name -> its share, relative to the others', above 0.

    ``dataset``: its name or hash; two data sets are divided differently. Raises HsError where there is no host, or a share that is none.
    """
    names = sorted(hosts)
    wrong = [name for name in names if not (0 < hosts[name] < math.inf)]
    if not names or wrong:
        what = "{} has the share {}".format(wrong[0], hosts[wrong[0]]) if wrong else "there is no host to divide among"
        raise HsError(what, "everything: nothing was divided", "give each host a share above 0 (hs_share)")
    salt = _seed(dataset)
    # by hash, so that who comes too late to his first host is nobody's choice, nor the data set's order
    keyed = sorted((_mix(index ^ salt), index, tokens) for index, tokens in samples)
    whole, total = sum(tokens for _, _, tokens in keyed), sum(hosts[name] for name in names)
    targets = [whole * hosts[name] / total for name in names]
    parts: List[List[Tuple[int, int]]] = [[] for _ in names]
    loads = [0] * len(names)
    seeds, shares = [_seed(name) for name in names], [hosts[name] for name in names]
    even = len(set(shares)) == 1
    bounds = [target * (1 + SLACK) for target in targets]
    everyone = range(len(names))
    for key, index, tokens in keyed:
        scores: Sequence[float] = [_mix(key ^ seed) for seed in seeds]
        if not even:
            scores = [-share / math.log((score + 1) / (_WORD + 2)) for share, score in zip(shares, scores)]
        host = max(everyone, key=scores.__getitem__)
        if loads[host] + tokens > bounds[host]:
            order = sorted(everyone, key=scores.__getitem__, reverse=True)
            fits = [one for one in order if loads[one] + tokens <= bounds[one]]
            host = fits[0] if fits else min(order, key=lambda one: (loads[one] + tokens) / targets[one])
        parts[host].append((index, tokens))
        loads[host] += tokens
    _level(parts, loads, targets)
    return {name: sorted(index for index, _ in part) for name, part in zip(names, parts)}


def _level(parts: List[List[Tuple[int, int]]], loads: List[int], targets: Sequence[float]) -> None:
    """Move samples from the fullest host to the emptiest until both are near their mean, or no move brings them nearer."""
    everyone = range(len(parts))
    for _ in range(64 * len(parts)):
        rich = max(everyone, key=lambda one: loads[one] / targets[one] if targets[one] else 0.0)
        poor = min(everyone, key=lambda one: loads[one] / targets[one] if targets[one] else 0.0)
        over, under = loads[rich] - targets[rich], targets[poor] - loads[poor]
        if over <= LEVEL * targets[rich] and under <= LEVEL * targets[poor]:
            return
        moved = _fitting(parts[rich], min(over, under))
        if not moved:
            # too large to fit: the one that brings the two nearest to each other, if any does
            gap = over + under
            near = min(parts[rich], key=lambda sample: (abs(sample[1] - gap / 2), sample[0]))
            if near[1] >= gap:
                return
            moved = [near]
        gone = {index for index, _ in moved}
        parts[rich] = [sample for sample in parts[rich] if sample[0] not in gone]
        parts[poor] += moved
        weight = sum(tokens for _, tokens in moved)
        loads[rich] -= weight
        loads[poor] += weight


def _fitting(part: List[Tuple[int, int]], room: float) -> List[Tuple[int, int]]:
    """Samples of ``part`` that fill ``room`` tokens, the last comers first."""
    taken: List[Tuple[int, int]] = []
    for sample in reversed(part):
        if sample[1] <= room:
            taken.append(sample)
            room -= sample[1]
            if room < 1:
                break
    return taken
