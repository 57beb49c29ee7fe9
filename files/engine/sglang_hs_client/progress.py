"""What the run tells while it runs (progress.json, history.jsonl), and the rates it tells."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, Optional, Tuple

from sglang_hs.fsio import write_json

from .history import History


class Progress:
    """Written at most once a second by a thread of its own, so that a hanging request does not silence it.

    ``counts`` gives total, done, failed, quarantined, tokens_total, tokens_done, bytes_done; called once a tick.
    ``moving``: what is told of samples that move on to a remote, {} where none do.
    Rates are over the last minute. ``dump_dir``, ``output_dir``: whose free bytes are told beside them.
    """

    def __init__(
        self,
        run_dir: Path,
        counts: Callable[[], Dict[str, int]],
        dump_dir: str,
        output_dir: str,
        moving: Optional[Callable[[], Dict[str, Any]]] = None,
    ) -> None:
        self.path = run_dir / "progress.json"
        self._run_dir = run_dir
        self._history: Optional[History] = None
        self._folders = {"dump_free": dump_dir, "output_free": output_dir}
        self._counts = counts
        self._moving = moving or dict
        self._started = time.time()
        self._phase = "canary"
        self._message = ""
        self._lock = threading.Lock()
        self._marks: Deque[Tuple[float, int, int]] = deque()
        self._stop = threading.Event()
        self._thread: Optional[threading.Thread] = None

    def start(self) -> None:
        """Begin to write, once a second."""
        self.write()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            self.write()

    def phase(self, name: str, message: str = "") -> None:
        """The run is in phase canary, extract, finish or done."""
        with self._lock:
            self._phase, self._message = name, message
            if name == "extract":
                self._marks.clear()

    def say(self, message: str) -> None:
        """One line for whoever watches."""
        with self._lock:
            self._message = message

    def write(self, last: bool = False) -> None:
        """Write the files now. ``last``: the history gets a line whether it is time for one or not."""
        try:
            counts = self._counts()
            moving = self._moving()
            with self._lock:
                document = self._document(counts)
            if moving:
                document["moving"] = moving
            write_json(self.path, document, 0o644)
            if self._history is None:
                self._history = History(self._run_dir)
            self._history.add(
                {
                    "at": document["updated"],
                    "tokens": document["tokens_done"],
                    "bytes": document["bytes_done"],
                    **{key: document[key] for key in ("phase", "done", "failed", "quarantined", *self._folders)},
                },
                last,
            )
        except OSError:
            pass  # a full disk must not end the run here; the run itself notices in its own place

    def _document(self, counts: Dict[str, int]) -> Dict[str, Any]:
        now = time.time()
        tokens, size = counts.get("tokens_done", 0), counts.get("bytes_done", 0)
        self._marks.append((now, tokens, size))
        while len(self._marks) > 2 and now - self._marks[0][0] > 60:
            self._marks.popleft()
        since, tokens_then, size_then = self._marks[0]
        seconds = max(now - since, 1e-9)
        speed = max(tokens - tokens_then, 0) / seconds
        left = max(counts.get("tokens_total", 0) - tokens, 0)
        return {
            "phase": self._phase,
            "total": counts.get("total", 0),
            "done": counts.get("done", 0),
            "failed": counts.get("failed", 0),
            "quarantined": counts.get("quarantined", 0),
            "tokens_total": counts.get("tokens_total", 0),
            "tokens_done": tokens,
            "bytes_done": size,
            "tokens_per_s": round(speed, 1),
            "bytes_per_s": round(max(size - size_then, 0) / seconds, 1),
            "started": self._started,
            "updated": now,
            "eta_s": round(left / speed) if speed > 0 else None,
            "message": self._message,
            **{key: free_bytes(folder) for key, folder in self._folders.items()},
        }

    def stop(self) -> None:
        """Stop the thread and write a last time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.write(last=True)


def free_bytes(folder: str) -> Optional[int]:
    """Bytes that an ordinary user may still write in ``folder``'s file system; None where it cannot be asked for."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
