"""What happens during a forward: open a recording, copy the states as they pass, close it and hand it to the writer.

A hook here never raises into the engine and never changes what the model computes or returns: trouble ends the recording with
a reason, and the server lives.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch

from . import engine, forwards
from .buffers import Pool, Slot
from .exchange import Exchange
from .settings import Settings
from .tensorfile import NAMES, Buffer, as_bytes, header
from .writer import Dump, Job, Writer

log = logging.getLogger("sglang_hs_capture")


class Recording:
    """One forward that holds wanted sequences.

    Its slot's area holds, in the model's dtype and one after the other: states [rows, slots, H]; post-norm final [rows, H] if
    both final states are asked for; attention inputs [boundaries, rows, H] if a sequence is wished from every rank.
    """

    def __init__(self, rows: int, sequences: List[forwards.Sequence], probe: bool) -> None:
        self.rows = rows
        self.sequences = sequences
        self.probe = probe
        self.slot: Optional[Slot] = None
        self.size = 0
        self.states = self.post = self.inputs = torch.empty(0, device="cpu")
        self.seen: Set[Any] = set()
        self.problem: Optional[str] = None


def guarded(method: Callable[..., None]) -> Callable[..., None]:
    """A hook whose exceptions become the recording's reason instead of the engine's end."""

    @functools.wraps(method)
    def call(self: "Recorder", *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            log.exception("the capture failed in %s", method.__name__)
            if self.current is not None:
                self.current.problem = self.current.problem or "the capture failed: {!r}".format(error)

    return call


class Recorder:
    """The state between the hooks of one model. hidden_size: H. dtype: of the residual stream."""

    def __init__(
        self,
        settings: Settings,
        exchange: Exchange,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        release: str,
    ) -> None:
        self.settings = settings
        self.exchange = exchange
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.release = release
        self.pool = Pool(settings.buffers, device)
        self.writer = Writer(exchange, self.pool)
        self.current: Optional[Recording] = None
        self._position = {boundary: index for index, boundary in enumerate(settings.boundaries)}

    # -- hooks ---------------------------------------------------------------------------------------------------------

    @guarded
    def begin(self, batch: Any) -> None:
        """Before the model's forward of ``batch`` (a ForwardBatch)."""
        if self.current is not None:  # the previous forward ended in an exception: its closing hook never ran
            self._abandon(self.current, "the forward ended in an error of the engine")
        if getattr(getattr(batch, "forward_mode", None), "name", "") != "EXTEND":
            return
        if not self.exchange.has_wishes() or engine.graph_capture_running():
            return
        rows, wanted, refused = forwards.plan(batch, self.exchange.wish)
        for name, reason in refused:
            self.exchange.fail(name or "unnamed", reason)
        if self.exchange.rank != 0:
            wanted = [sequence for sequence in wanted if sequence.every_rank]
        if wanted:
            self.current = Recording(rows, wanted, probe=any(sequence.every_rank for sequence in wanted))
            self._open(self.current)

    @guarded
    def boundary(self, index: int, state: Any) -> None:
        """The residual stream before layer ``index`` is whole in ``state`` [rows, H]."""
        recording = self.current
        if recording is None or recording.problem:
            return
        if self._fits(recording, state, "the state before layer {}".format(index)):
            recording.states[:, self._position[index]].copy_(state[: recording.rows])
            recording.seen.add(index)

    @guarded
    def attention_input(self, index: int, state: Any) -> None:
        """Layer ``index``'s attention received ``state``: the normed boundary, an independent witness for the canary."""
        recording = self.current
        if recording is None or recording.problem or not recording.probe:
            return
        if (
            isinstance(state, torch.Tensor)
            and state.dtype == self.dtype
            and state.dim() == 2
            and state.shape[0] >= recording.rows
        ):
            recording.inputs[self._position[index]].copy_(state[: recording.rows])
            recording.seen.add(("input", index))

    @guarded
    def final(self, args: Any, output: Any) -> None:
        """The final norm was called with ``args`` (x, residual) and gave ``output`` (normed, x + residual)."""
        recording = self.current
        if recording is None or recording.problem:
            return
        if isinstance(output, (tuple, list)) and len(output) == 2:
            normed, whole = output
        else:
            normed, whole = output, args[0] if args else None
        if args and getattr(args[0], "_sglang_needs_allreduce_fusion", False):
            recording.problem = "the final norm received a partial sum (unfused all-reduce)"
            return
        last = self.settings.slots - 1
        if self.settings.final in ("pre_norm", "both"):
            if whole is normed:
                recording.problem = "the final norm worked in place: its input is gone"
            elif self._fits(recording, whole, "the pre-norm final state"):
                recording.states[:, last].copy_(whole[: recording.rows])
                recording.seen.add("pre_norm")
        if self.settings.final in ("post_norm", "both") and self._fits(recording, normed, "the post-norm final state"):
            target = recording.post if self.settings.final == "both" else recording.states[:, last]
            target.copy_(normed[: recording.rows])
            recording.seen.add("post_norm")

    @guarded
    def end(self) -> None:
        """After the model's forward."""
        recording = self.current
        if recording is None:
            return
        if not recording.problem:
            needed: Set[Any] = set(self.settings.boundaries)
            needed |= {"pre_norm", "post_norm"} if self.settings.final == "both" else {self.settings.final}
            missing = [str(part) for part in self.settings.boundaries if part not in recording.seen]
            missing += [part for part in ("pre_norm", "post_norm") if part in needed - recording.seen]
            if missing:
                recording.problem = (
                    "the forward went around the hooks of: {} (two-batch overlap, or a CUDA graph?)".format(
                        ", ".join(missing)
                    )
                )
        if recording.problem:
            self._abandon(recording, recording.problem)
            return
        try:
            self._hand_over(recording)
        except Exception as error:
            log.exception("the capture failed to hand a forward over")
            self._abandon(recording, "the capture failed: {!r}".format(error))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _open(self, recording: Recording) -> None:
        """Take a slot (waiting for a free one) and lay the recording's tensors over it."""
        rows, width = recording.rows, self.hidden_size
        counts = [rows * self.settings.slots * width]
        counts.append(rows * width if self.settings.final == "both" else 0)
        counts.append(len(self.settings.boundaries) * rows * width if recording.probe else 0)
        recording.size = sum(counts) * self.dtype.itemsize
        recording.slot = self.pool.take(recording.size)
        states, post, inputs = recording.slot.area[: recording.size].view(self.dtype).split(counts)
        recording.states = states.view(rows, self.settings.slots, width)
        recording.post = post.view(-1, width)
        recording.inputs = inputs.view(-1, rows, width)

    def _hand_over(self, recording: Recording) -> None:
        """Give the forward to the writer. From here on only the slot's host buffer and copies of our own are looked at.

        The engine lends its tensors for the forward alone: its runner keeps one set of input buffers and puts the next batch into them.
        """
        slot = recording.slot
        assert slot is not None
        dumps = []
        for sequence in recording.sequences:
            for name, per_rank in self.exchange.done_paths(sequence.name, sequence.every_rank).items():
                pieces = functools.partial(self._pieces, recording, sequence, per_rank)
                dumps.append(Dump(sequence.name, self.exchange.folder / "done" / name, pieces))
        self.pool.send(slot, recording.size)
        # the next forward writes into the same device memory, and a larger one replaces it: a lagging writer holds none of it
        recording.states = recording.post = recording.inputs = torch.empty(0, device="cpu")
        self.writer.put(Job(slot, dumps))
        self.current = None

    def _abandon(self, recording: Recording, reason: str) -> None:
        self.current = None
        if recording.slot is not None:
            self.pool.give_back(recording.slot)
        for sequence in recording.sequences:
            self.exchange.fail(sequence.name, reason)

    def _fits(self, recording: Recording, state: Any, what: str) -> bool:
        """Whether ``state`` is a whole [rows, H] tensor of the model's dtype; if not, the reason is noted."""
        if not isinstance(state, torch.Tensor):
            recording.problem = "{} is no tensor but {}".format(what, type(state).__name__)
        elif getattr(state, "_sglang_needs_allreduce_fusion", False):
            recording.problem = "{} is a partial sum (unfused all-reduce)".format(what)
        elif state.dim() != 2 or state.shape[1] != self.hidden_size or state.shape[0] < recording.rows:
            recording.problem = "{} has shape {} for {} tokens of {}".format(
                what, list(state.shape), recording.rows, self.hidden_size
            )
        elif state.dtype != self.dtype:
            recording.problem = "{} is {}, the model's type is {}".format(what, state.dtype, self.dtype)
        return recording.problem is None

    def _pieces(
        self, recording: Recording, sequence: forwards.Sequence, per_rank: bool
    ) -> Tuple[Callable[[str], bytes], List[Buffer]]:
        """One sequence's file: its header, given the data's checksum, and its data. Called by the writer's thread, once the slot is in host memory."""
        assert recording.slot is not None
        host = as_bytes(recording.slot.host[: recording.size])
        row = self.hidden_size * self.dtype.itemsize  # bytes of one state of one token
        slots, rows, length = self.settings.slots, recording.rows, sequence.length
        dtype = NAMES[self.dtype]
        tensors: List[Any] = [("token_ids", "I64", [length], 8 * length)]
        pieces: List[Buffer] = [sequence.ids.contiguous().numpy().astype("<i8", copy=False).tobytes()]

        def add(name: str, shape: List[int], parts: List[memoryview]) -> None:
            tensors.append((name, dtype, shape, sum(map(len, parts))))
            pieces.extend(parts)

        def part(offset: int, width: int) -> memoryview:
            return host[offset + sequence.start * width : offset + sequence.stop * width]

        add("hidden_states", [length, slots, self.hidden_size], [part(0, slots * row)])
        offset = rows * slots * row
        if self.settings.final == "both":
            add("final_post_norm", [length, self.hidden_size], [part(offset, row)])
            offset += rows * row
        count = len(self.settings.boundaries)
        if per_rank and all(("input", boundary) in recording.seen for boundary in self.settings.boundaries):
            inputs = [part(offset + index * rows * row, row) for index in range(count)]
            add("attention_input", [count, length, self.hidden_size], inputs)
        return lambda crc32: header(tensors, self._metadata(sequence, crc32)), pieces

    def _metadata(self, sequence: forwards.Sequence, crc32: str) -> Dict[str, str]:
        return {
            "boundaries": ",".join(map(str, self.settings.boundaries)),
            "final": self.settings.final,
            "dtype": str(self.dtype).replace("torch.", ""),
            "release": self.release,
            "name": sequence.name,
            "prompts": str(sequence.prompts),
            "crc32": crc32,
        }
