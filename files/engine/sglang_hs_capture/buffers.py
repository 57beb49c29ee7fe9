"""Memory between the forward and the writer thread: one device area, a bounded pool of host buffers, a side stream."""

from __future__ import annotations

import queue
from typing import Optional

import torch


class Slot:
    """A host buffer that holds the states of one forward until they are written.

    ``area`` is where the forward copies to: the host buffer itself on a CPU, the pool's device area on CUDA.
    """

    def __init__(self) -> None:
        self.host = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.area = self.host
        self.ready: Optional[torch.cuda.Event] = None

    def wait(self) -> None:
        """Block the calling (writer's) thread until the bytes are in host memory."""
        if self.ready is not None:
            self.ready.synchronize()
            self.ready = None


class Pool:
    """``count`` slots; taking one blocks while all are in use, which is the back-pressure on a lagging storage.

    Nothing is overwritten before it was read. Host: a slot comes back when its writer is done, and no sooner. CUDA: the forward's
    stream waits for ``_drained`` before it writes the device area again; the side stream waits for the forward's before it reads it,
    and the writer for ``ready``. An area that is replaced is told to the allocator as in use by the side stream; an abandoned forward sent
    nothing, and its copies go before the next forward's on the same stream.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._free: "queue.Queue[Slot]" = queue.Queue()
        for _ in range(count):
            self._free.put(Slot())
        self._stream: Optional[torch.cuda.Stream] = None
        self._area: Optional[torch.Tensor] = None  # on CUDA: device bytes, shared by all slots, one forward at a time
        self._drained: Optional[torch.cuda.Event] = None  # when the side stream has read the device area

    def take(self, size: int) -> Slot:
        """A slot of at least ``size`` bytes, its ``area`` ready to be written by the current stream."""
        slot = self._free.get()
        try:
            if slot.host.numel() < size:
                slot.host = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one goes before the new one comes
                slot.host = torch.empty(_rounded(size), dtype=torch.uint8, device="cpu", pin_memory=self.cuda)
            slot.area = self._device_area(size) if self.cuda else slot.host
        except BaseException:
            self._free.put(slot)
            raise
        return slot

    def _device_area(self, size: int) -> torch.Tensor:
        if self._stream is None:
            self._stream = torch.cuda.Stream(device=self.device)
        if self._drained is not None:
            # the current stream (not this thread) waits until the previous forward's bytes have left the area
            torch.cuda.current_stream(self.device).wait_event(self._drained)
        if self._area is None or self._area.numel() < size:
            if self._area is not None:
                self._area.record_stream(self._stream)
                self._area = None
            self._area = torch.empty(_rounded(size), dtype=torch.uint8, device=self.device)
        return self._area

    def send(self, slot: Slot, size: int) -> None:
        """Start moving the first ``size`` bytes of the slot's area to its host buffer, beside the forward's own stream."""
        if not self.cuda:
            return
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            slot.host[:size].copy_(slot.area[:size], non_blocking=True)
            slot.ready = torch.cuda.Event()
            slot.ready.record(self._stream)
        self._drained = slot.ready
        slot.area = slot.host  # else a slot that waits would keep a device area that a larger one has replaced

    def give_back(self, slot: Slot) -> None:
        """The slot's bytes are written, or nobody wants them."""
        self._free.put(slot)


def _rounded(size: int) -> int:
    """``size`` with some room, so that slightly longer prompts do not each allocate anew."""
    step = 1 << 20
    return (size + size // 8 + step - 1) // step * step
