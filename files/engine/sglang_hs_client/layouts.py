"""How each trainer's file looks: its name, and the object that ``torch.save`` writes. docs/formats.md has the load commands.

Every tensor has a storage of its own: torch.save writes the whole storage behind a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict

import torch
from sglang_hs import formats

from .captured import Captured

GROUP = 2000  # files in one of SpecForge's rows_{a}-{b} folders


@dataclass(frozen=True)
class Layout:
    """name: of the format. path: row number -> file, relative to the target. build: (sample, final) -> what is saved."""

    name: str
    path: Callable[[int], str]
    build: Callable[[Captured, str], Dict[str, Any]]


def own(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy; also where ``contiguous()`` would hand back the view itself."""
    return tensor.clone(memory_format=torch.contiguous_format)


def side_by_side(states: torch.Tensor) -> torch.Tensor:
    """[T, n, H] -> [T, n * H], boundary by boundary."""
    return torch.cat(list(states.unbind(1)), dim=-1)


def _speculators(sample: Captured, final: str) -> Dict[str, Any]:
    return {
        "input_ids": own(sample.token_ids),
        "hidden_states": [own(state) for state in (*sample.states.unbind(1), sample.final[final])],
        "loss_mask": sample.loss_mask,
    }


def _specforge(sample: Captured, final: str) -> Dict[str, Any]:
    return {
        "input_ids": own(sample.token_ids),
        "loss_mask": sample.loss_mask,
        "hidden_state": own(sample.final[final]).unsqueeze(0),
        "aux_hidden_state": side_by_side(sample.states).unsqueeze(0),
    }


def _modelopt(sample: Captured, final: str) -> Dict[str, Any]:
    return {
        "input_ids": own(sample.token_ids),
        "hidden_states": own(sample.final[final]),
        "aux_hidden_states": side_by_side(sample.states),
        "loss_mask": sample.loss_mask,
        "conversation_id": conversation(sample.idx),
        "hidden_states_prenorm": final == formats.PRE,
    }


def conversation(idx: int) -> str:
    """ModelOpt's name of a sample: the data set's row."""
    return "row_{}".format(idx)


def _rows_folder(idx: int) -> str:
    start = idx // GROUP * GROUP
    return "rows_{}-{}".format(start, start + GROUP)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("speculators-pt", lambda idx: "data_{}.pt".format(idx), _speculators),
        Layout("specforge", lambda idx: "{}/data_{}.ckpt".format(_rows_folder(idx), idx), _specforge),
        Layout("modelopt", lambda idx: "{}.pt".format(conversation(idx)), _modelopt),
    )
}
