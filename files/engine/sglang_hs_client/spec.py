"""The specification of a run: one JSON file, checked before anything else happens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, List, Optional, get_type_hints

from sglang_hs.errors import HsError
from sglang_hs.movesettings import HighWater, Move

FINALS = ("pre_norm", "post_norm", "both")


@dataclass(frozen=True)
class CanarySpec:
    """sequences: prompts checked before the data set. positions: least number of positions whose log-probabilities are compared."""

    sequences: int = 4
    positions: int = 64
    skip: bool = False


@dataclass(frozen=True)
class Spec:
    """server: base URL. dump_dir: the exchange with the capture. cut_to, max_prompt: tokens. Times in seconds.

    tokens_in_flight: where several prompts share a forward, tokens at the server at once; None: prompts go one at a time.
    retries: further attempts for one sample. error_budget: samples that may fail for good before the run stops.
    in_flight: prompts at the server; as many more may be on their way to the output folder.
    outage_s: how long the server may be unreachable, or the dump folder full, before the run gives up. dump_wait_s: how long after the
    server's answer the dump may take. stop_taking_work_at: unix time. move: where finished samples go on to while the run is at work;
    None: they stay. share: a file with the part of the data set that is this host's (sglang_hs.share); None: all of it is.
    """

    server: str
    dataset: str
    output_dir: str
    dump_dir: str
    model_path: str
    hidden_size: int
    vocab_size: int
    max_prompt: int
    run_dir: str
    boundaries: List[int]
    final: str = "pre_norm"
    cut_to: Optional[int] = None
    in_flight: int = 4
    tokens_in_flight: Optional[int] = None
    retries: int = 3
    error_budget: int = 0
    request_timeout_s: float = 600.0
    dump_wait_s: float = 120.0
    outage_s: float = 60.0
    run_id: str = ""
    api_key: Optional[str] = field(default=None, repr=False)
    stop_taking_work_at: Optional[float] = None
    share: Optional[str] = None
    canary: CanarySpec = CanarySpec()
    move: Optional[Move] = None
    provenance: Dict[str, Any] = field(default_factory=dict)

    @property
    def output(self) -> Path:
        """The output folder."""
        return Path(self.output_dir)

    @property
    def states(self) -> int:
        """Number of states a token has in ``hidden_states``: the boundaries and one final state."""
        return len(self.boundaries) + 1


def load(path: Path) -> Spec:
    """The specification in ``path``; HsError names the key that is wrong."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise HsError(
            "the specification {} is not readable: {}".format(path, error), "everything", "give --spec a JSON file"
        ) from error
    return parse(document)


def parse(document: Any) -> Spec:
    """The specification in a JSON object."""
    if not isinstance(document, dict):
        raise _wrong("the specification is no object")
    values = dict(document)
    canary = values.pop("canary", None) or {}
    if not isinstance(canary, dict):
        raise _wrong("canary must be an object, got {!r}".format(canary))
    move = values.pop("move", None) or None
    try:
        moved = Move.of(move) if move else None
    except (TypeError, ValueError) as error:
        raise _wrong("move: {}".format(error)) from error
    if moved is not None:
        HighWater(moved.high_water)
    try:
        spec = Spec(canary=CanarySpec(**canary), move=moved, **values)
    except TypeError as error:
        raise _wrong(
            str(error).replace("Spec.__init__()", "the specification").replace("CanarySpec", "canary")
        ) from error
    _check_types(spec)
    for holds, what in (
        (spec.final in FINALS, "final must be one of {}".format(", ".join(FINALS))),
        (
            spec.boundaries and spec.boundaries == sorted(set(spec.boundaries)) and spec.boundaries[0] >= 0,
            "boundaries must rise",
        ),
        (spec.in_flight >= 1, "in_flight must be at least 1"),
        (spec.tokens_in_flight is None or spec.tokens_in_flight >= 1, "tokens_in_flight must be at least 1"),
        (spec.retries >= 0, "retries must not be negative"),
        (spec.error_budget >= 0, "error_budget must not be negative"),
        (spec.cut_to is None or spec.cut_to >= 1, "cut_to must be at least 1"),
        (
            min(spec.hidden_size, spec.vocab_size, spec.max_prompt) >= 1,
            "hidden_size, vocab_size and max_prompt must be positive",
        ),
        (
            spec.canary.sequences >= 1 and spec.canary.positions >= 1,
            "canary.sequences and canary.positions must be at least 1",
        ),
        (spec.server.startswith(("http://", "https://")), "server must be a URL"),
    ):
        if not holds:
            raise _wrong(what)
    return spec


def _check_types(spec: Spec) -> None:
    kinds = {
        str: (str,),
        int: (int,),
        float: (int, float),
        Optional[int]: (int, type(None)),
        Optional[float]: (int, float, type(None)),
        Optional[str]: (str, type(None)),
    }
    hints = get_type_hints(Spec)
    for entry in fields(Spec):
        value, kind = getattr(spec, entry.name), kinds.get(hints[entry.name])
        if kind and (not isinstance(value, kind) or isinstance(value, bool)):
            raise _wrong("{} has the wrong type: {!r}".format(entry.name, value))
    if not isinstance(spec.boundaries, list) or any(type(boundary) is not int for boundary in spec.boundaries):
        raise _wrong("boundaries must be a list of numbers, got {!r}".format(spec.boundaries))
    if not isinstance(spec.provenance, dict):
        raise _wrong("provenance must be an object")


def _wrong(what: str) -> HsError:
    return HsError(
        "the client's specification is wrong: {}".format(what),
        "everything: nothing was sent to the server",
        "correct it and start again",
    )
