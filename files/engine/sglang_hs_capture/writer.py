"""The thread that writes dumps, so that the forward never waits for storage unless every buffer is full."""

from __future__ import annotations

import errno
import logging
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Tuple

from .buffers import Pool, Slot
from .exchange import Exchange
from .tensorfile import SUMMERS, Buffer, write_summed

log = logging.getLogger("sglang_hs_capture")

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Dump:
    """One file to write: for sequence ``name``, to ``path``.

    ``pieces``, called once the bytes are in host memory, gives what makes the header of the data's checksum, and the data.
    """

    name: str
    path: Path
    pieces: Callable[[], Tuple[Callable[[str], bytes], List[Buffer]]]


@dataclass
class Job:
    """The dumps of one forward and the slot that holds their bytes."""

    slot: Slot
    dumps: List[Dump]


class Writer:
    """Takes jobs in order; never dies of one."""

    def __init__(self, exchange: Exchange, pool: Pool) -> None:
        self._exchange = exchange
        self._pool = pool
        self._jobs: "queue.Queue[Job]" = queue.Queue()
        self._thread: Optional[threading.Thread] = None
        self._summers = ThreadPoolExecutor(
            SUMMERS, thread_name_prefix="sglang-hs-crc"
        )  # they start with the first dump

    def put(self, job: Job) -> None:
        """Hand a job over; the thread starts with the first one (after all forks of the engine)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sglang-hs-writer", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job.slot.wait()
                for dump in job.dumps:
                    self._write(dump)
            except Exception as error:
                log.exception("the writer failed")
                for dump in job.dumps:
                    self._exchange.fail(dump.name, "the writer failed: {!r}".format(error))
            finally:
                self._pool.give_back(job.slot)

    def _write(self, dump: Dump) -> None:
        try:
            start, pieces = dump.pieces()
            try:
                write_summed(dump.path, start, pieces, self._summers, self._exchange.used())
            except OSError as error:
                if error.errno not in NO_ROOM or not self._exchange.make_room():
                    raise
                write_summed(dump.path, start, pieces, self._summers)
        except OSError as error:
            no_room = error.errno in NO_ROOM
            if no_room:
                reason = "no space left in {} for the dump; free some, or lower the number of prompts in flight".format(
                    dump.path.parent
                )
            else:
                reason = "cannot write {}: {}".format(dump.path, error)
            self._exchange.fail(dump.name, reason, no_room)
