"""Trainers' formats: which final state each reads, and so which one a capture must keep."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from .errors import HsError

UNTOUCHED = "everything: production was not touched"
PRE, POST, BOTH, AUTO = "pre_norm", "post_norm", "both", "auto"

# Each format with the final states that its reader takes; unless told otherwise it gets the first that was captured.
READS: Dict[str, Tuple[str, ...]] = {
    "native": (PRE,),  # speculators 0.5 and later: the trainer applies the verifier's norm itself
    "speculators-pt": (PRE, POST),  # 0.4 to 0.7 pre-norm, 0.3 post-norm
    "specforge": (POST,),  # target logits are lm_head(hidden_state)
    "modelopt": (POST, PRE),  # each file says which, in hidden_states_prenorm; older releases take all for post-norm
}


def kept(final: str) -> Tuple[str, ...]:
    """The final states that a capture with ``final`` (pre_norm, post_norm, both) holds."""
    return (PRE, POST) if final == BOTH else (final,)


def final_for(formats: Any, final: str) -> str:
    """The final state to capture for ``formats``: pre_norm, post_norm or both. ``final``: the operator's wish, or auto.

    HsError where a format is unknown or could not be made of what is wished.
    """
    names = chosen(formats)
    if final in (AUTO, "", None):
        return BOTH if any(PRE not in READS[name] for name in names) else PRE
    if final not in (PRE, POST, BOTH):
        raise HsError("hs_final holds {!r}".format(final), UNTOUCHED, "set it to auto, pre_norm, post_norm or both")
    for name in names:
        if not set(READS[name]) & set(kept(final)):
            raise HsError(
                "hs_final is {}, but {} (in hs_formats) reads the {} final state".format(final, name, READS[name][0]),
                UNTOUCHED,
                "set hs_final to both or auto, or leave {} out of hs_formats".format(name),
            )
    return final


def chosen(formats: Any) -> List[str]:
    """The formats as a list without repeats; HsError where one is unknown or there is none."""
    names = [name.strip() for name in formats.split(",")] if isinstance(formats, str) else list(formats or [])
    unknown = [name for name in names if name not in READS]
    if unknown or not names:
        raise HsError(
            "hs_formats holds {}".format("{!r}".format(unknown[0]) if unknown else "nothing"),
            UNTOUCHED,
            "choose among {}".format(", ".join(READS)),
        )
    return list(dict.fromkeys(names))
