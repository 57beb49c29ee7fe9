"""Which sequences of a forward are wanted, where each lies among its rows, and why one cannot be captured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Callable, List, Optional, Tuple

import torch

from .exchange import sequence_name

_NAME = re.compile(r"[0-9a-f]{64}")

# (name, reason) of a wish that this forward cannot fulfil; name None: the engine does not tell whose forward it is
Refusal = Tuple[Optional[str], str]


@dataclass(frozen=True)
class Sequence:
    """Rows ``start`` to ``stop`` of the forward hold the sequence ``name``. ids: int64 [T], host memory.

    prompts: how many sequences the forward holds, this one among them.
    """

    name: str
    start: int
    stop: int
    ids: torch.Tensor
    every_rank: bool
    prompts: int = 1

    @property
    def length(self) -> int:
        """Number of tokens, T."""
        return self.stop - self.start


def plan(batch: Any, wish: Callable[[str], Optional[str]]) -> Tuple[int, List[Sequence], List[Refusal]]:
    """Read a ForwardBatch of mode EXTEND: (rows that are tokens, wanted sequences, refused wishes).

    ``wish(name)`` gives the wish's content or None. Sequences that nobody wished are passed over in silence.
    """
    lengths = _numbers(getattr(batch, "extend_seq_lens_cpu", None))
    prefixes = _numbers(getattr(batch, "extend_prefix_lens_cpu", None)) or [0] * len(lengths)
    rids = getattr(batch, "rids", None)
    rids = list(rids) if rids is not None else []
    # a copy of our own, also on a CPU: the writer needs it when the engine may have put something else into its tensor
    ids = batch.input_ids.detach().to("cpu", torch.int64, copy=True)
    rows = sum(lengths)
    problem = None
    if not lengths or len(prefixes) != len(lengths):
        problem = "the engine does not tell the lengths of the sequences in the forward"
    elif ids.numel() != rows:
        # padding at the end is understood where the engine itself counts the real tokens; anything else is not
        real = getattr(batch, "num_token_non_padded_cpu", None)
        if ids.numel() < rows or real is None or int(real) != rows:
            problem = "the forward has {} rows for {} tokens: padding that the capture does not understand".format(
                ids.numel(), rows
            )
    if problem:
        names = [name for name in map(_name, rids) if name and wish(name) is not None]
        return rows, [], [(name, problem) for name in names] or [(None, problem)]
    wanted: List[Sequence] = []
    refused: List[Refusal] = []
    start = 0
    for index, (length, prefix) in enumerate(zip(lengths, prefixes)):
        stop = start + length
        part = ids[start:stop]
        asked = _name(rids[index]) if index < len(rids) else None
        name = sequence_name(part)
        content = wish(name) if prefix == 0 else None
        if content is not None:
            if all(known.name != name for known in wanted):
                wanted.append(Sequence(name, start, stop, part, content == "ranks", len(lengths)))
        elif prefix:
            reason = "{} tokens of the prompt were not computed in this forward: a prefix cache hit, or a later chunk of a long prompt".format(
                prefix
            )
            if asked is None and not rids:
                refused.append((None, reason))
            elif asked is not None and wish(asked) is not None:
                refused.append((asked, reason))
        elif asked is not None and asked != name and wish(asked) is not None:
            refused.append(
                (
                    asked,
                    "the forward holds {} tokens that are not the prompt: a chunk of it, or the server cut it".format(
                        length
                    ),
                )
            )
        start = stop
    return rows, wanted, refused


def _numbers(values: Any) -> List[int]:
    """A list of ints from a list or a tensor; empty for None."""
    return [] if values is None else [int(value) for value in values]


def _name(rid: Any) -> Optional[str]:
    """The sequence name that the client put at the start of its request id, None for a stranger's request."""
    match = _NAME.match(str(rid))
    return match.group(0) if match else None
