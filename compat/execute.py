"""Run a release's own ``DeepseekV2Model`` from a source file, unedited and edited, and judge what comes out.

Both are built by the release's own ``__init__`` and run by its own ``forward``, each through the release's own decoder layers
(tiny.py), under import stand-ins (standins.py). The edited one calls the real capture, by the lines that the edit put in.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Tuple

import torch

from . import standins, supplied, tiny

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "files" / "engine"))  # where the inserted lines find the capture

CLASS = "DeepseekV2Model"
POST_NORM_TOLERANCE = 1e-6  # float32 against float64; all other states are whole numbers and must be equal


class Wrong(Exception):
    """The source was run and something is not as it must be; says what."""


def load(path: Path, name: str) -> ModuleType:
    """Run the source file as the module that it is, and put the tiny layer in."""
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - the point of it
    module.DeepseekV2DecoderLayer = tiny.tiny_layer(module)  # type: ignore[attr-defined]
    return module


def build(module: ModuleType) -> Any:
    """The release's model, by its own ``__init__``."""
    before = len(standins.uses)
    model = getattr(module, CLASS)(tiny.config())
    _nothing_missing(before)
    return model


def run(model: Any, recorder: supplied.Recorder, embeds: bool) -> Any:
    """One forward over all of tiny.SEQUENCES. embeds: as for Kimi-K2.5, without ids but with their embeddings."""
    batch = tiny.batch()
    ids = batch.input_ids
    before = len(standins.uses)
    recorder.layers.clear()
    with torch.no_grad():
        given = {"input_embeds": tiny.EMBEDDING[ids].clone()} if embeds else {}
        output = model(None if embeds else ids, torch.arange(len(ids)), batch, **given)
    _nothing_missing(before)
    if recorder.layers != list(range(tiny.LAYERS)):
        raise Wrong("the layers ran in the order {}".format(recorder.layers))
    return output


def _nothing_missing(before: int) -> None:
    if len(standins.uses) > before:
        raise Wrong("; ".join(standins.uses[before:]))


def own_states(output: Any) -> List[torch.Tensor]:
    """The states that the model's own capture returned, in its order: a list of them, or one packed tensor."""
    if not isinstance(output, tuple) or len(output) != 2:
        raise Wrong("with its own capture on, forward returned {}".format(type(output).__name__))
    states = output[1]
    return list(states.split(tiny.HIDDEN, dim=-1)) if isinstance(states, torch.Tensor) else list(states)


def same(left: Any, right: Any) -> bool:
    """Whether two outputs are of the same types and hold the same values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def read_dump(path: Path) -> Dict[str, torch.Tensor]:
    """The tensors of a safetensors file, read by its documented layout and nothing of the capture's."""
    types = {"I64": torch.int64, "F32": torch.float32}
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in head.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            piece = bytearray(data[8 + size + start : 8 + size + stop])
            tensors[name] = torch.frombuffer(piece, dtype=types[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def name_of(ids: List[int]) -> str:
    """The name of a sequence, as docs/design.md has it: the hash of its ids as int64."""
    return hashlib.sha256(struct.pack("<{}q".format(len(ids)), *ids)).hexdigest()


def wish(folder: Path) -> None:
    """Ask for all of tiny.SEQUENCES."""
    for ids in tiny.SEQUENCES:
        (folder / "want" / name_of(ids)).write_text("")


def collect(folder: Path) -> Tuple[int, float]:
    """Take every dump, compare each state with the known one: (number of states, worst difference)."""
    count, worst = 0, 0.0
    for ids in tiny.SEQUENCES:
        path = folder / "done" / (name_of(ids) + ".safetensors")
        end = time.monotonic() + 10
        while not path.exists():
            reasons = [entry.read_text() for entry in (folder / "failed").iterdir()]
            if reasons or time.monotonic() > end:
                raise Wrong("no dump came: {}".format(reasons or "nothing was said"))
            time.sleep(0.001)
        dump = read_dump(path)
        path.unlink()
        known = tiny.reference(ids)
        states = [*known.boundaries, known.pre]
        if dump["token_ids"].tolist() != ids or list(dump["hidden_states"].shape) != [
            len(ids),
            len(states),
            tiny.HIDDEN,
        ]:
            raise Wrong("the dump has other ids, or the shape {}".format(list(dump["hidden_states"].shape)))
        for slot, state in enumerate(states):
            difference = float((dump["hidden_states"][:, slot].double() - state).abs().max())
            if difference != 0:
                what = "boundary {}".format(slot) if slot < tiny.LAYERS else "the pre-norm final state"
                raise Wrong("{} is off by {:g}".format(what, difference))
        difference = float((dump["final_post_norm"].double() - known.post).abs().max())
        if not difference <= POST_NORM_TOLERANCE:
            raise Wrong("the post-norm final state is off by {:g}".format(difference))
        worst = max(worst, difference)
        count += len(ids) * (len(states) + 1)
    return count, worst


def judge(release: str, root: Path, original: Path, edited: Path, scratch: Path) -> Dict[str, Any]:
    """Run both sources in this process, which is spent by it.

    root: folder that holds the kept files of the release. scratch: an empty folder; it can be removed once the process has
    ended, for the capture has a thread that writes. Returns layout, states, worst, own (the model's own capture:
    "checked", or "none" where the layout has none), refused (the reason, where the capture refused the model).
    Raises Wrong, or whatever the release's source raises.
    """
    torch.set_num_threads(1)
    recorder = supplied.Recorder()
    standins.install(root, supplied.supplied(release, recorder))
    folder = scratch / "dump"
    os.environ.pop("SGLANG_HS_DUMP_DIR", None)
    plain = build(load(original, "original_model"))
    inert = build(load(edited, "inert_model"))  # the edit without its environment variable
    os.environ["SGLANG_HS_DUMP_DIR"] = str(folder)
    os.environ["SGLANG_HS_BOUNDARIES"] = ",".join(map(str, range(tiny.LAYERS)))
    os.environ["SGLANG_HS_FINAL"] = "both"
    try:
        model = build(load(edited, "edited_model"))
    except RuntimeError as error:
        if "sglang_hs_capture refuses this server" in str(error):
            return {"refused": str(error)}
        raise
    record = folder / "attached" / "rank0.json"
    if not record.exists():
        raise Wrong("the inserted lines did not attach the capture")
    attached = json.loads(record.read_text())
    if attached["release"] != release:
        raise Wrong("the capture says that the release is {}".format(attached["release"]))
    states, worst = 0, 0.0
    own = hasattr(plain, "layers_to_capture")
    rounds = [[], tiny.OWN_CAPTURE] if own else [[]]
    for layers in rounds:
        for embeds in (False, True):
            if own:
                plain.layers_to_capture = inert.layers_to_capture = model.layers_to_capture = list(layers)
            wish(folder)
            answer = run(plain, recorder, embeds)
            if not same(run(model, recorder, embeds), answer):
                raise Wrong("forward of the edited source returns something else")
            count, difference = collect(folder)
            states, worst = states + count, max(worst, difference)
            if not same(run(inert, recorder, embeds), answer):
                raise Wrong("without its environment variable the edited source returns something else")
            if layers:
                check_own(own_states(answer))
    return {
        "layout": attached["layout"],
        "states": states,
        "worst": worst,
        "own": "checked" if own else "none",
    }


def check_own(states: List[torch.Tensor]) -> None:
    """The states of the model's own capture, against the known ones, in their order."""
    known = torch.cat([tiny.reference(ids).boundaries for ids in tiny.SEQUENCES], dim=1)
    if len(states) != len(tiny.OWN_CAPTURE):
        raise Wrong("the model's own capture gave {} states".format(len(states)))
    for layer, state in zip(tiny.OWN_CAPTURE, states):
        if not torch.equal(state.double(), known[layer]):
            raise Wrong("the model's own capture of boundary {} is not the known state".format(layer))


def in_child(release: str, root: Path, original: Path, edited: Path) -> Dict[str, Any]:
    """``judge`` in a process of its own. Adds ``error`` (one line) and ``trace`` where it ended with one."""
    with tempfile.TemporaryDirectory() as scratch:
        return _in_child(lambda: judge(release, root, original, edited, Path(scratch)))


def _in_child(work: Callable[[], Dict[str, Any]]) -> Dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = {"error": "{}: {}".format(type(error).__name__, error), "trace": traceback.format_exc()}
        with os.fdopen(write, "w") as handle:
            json.dump(answer, handle)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as handle:
        text = handle.read()
    os.waitpid(child, 0)
    result: Dict[str, Any] = json.loads(text) if text else {"error": "the process ended without a word", "trace": ""}
    return result
