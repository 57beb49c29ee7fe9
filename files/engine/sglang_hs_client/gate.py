"""How much may be at the server at once: a number of prompts, and where several share a forward also a number of tokens."""

from __future__ import annotations

import contextlib
import threading
from typing import Iterator, Optional


class Gate:
    """Lets prompts through while there is room. A prompt larger than ``tokens`` goes alone. ``tokens`` None: only prompts count."""

    def __init__(self, prompts: int, tokens: Optional[int] = None) -> None:
        self._prompts = prompts
        self._tokens = tokens
        self._inside = 0
        self._tokens_inside = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def through(self, tokens: int) -> Iterator[None]:
        """Wait for room for a prompt of ``tokens``; it is inside until the block ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._room(tokens))
            self._inside += 1
            self._tokens_inside += tokens
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._tokens_inside -= tokens
                self._changed.notify_all()

    def _room(self, tokens: int) -> bool:
        if self._inside >= self._prompts:
            return False
        return self._tokens is None or not self._inside or self._tokens_inside + tokens <= self._tokens
