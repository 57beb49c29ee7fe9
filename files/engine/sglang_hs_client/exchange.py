"""The client's side of the dump folder (see sglang_hs_capture/exchange.py for what lies where)."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

from sglang_hs.errors import HsError

from .faults import NoRoom, OutputFault, SampleFault
from .spec import Spec

NO_ROOM = 65536  # bytes: a reason takes a few thousand


class Exchange:
    """One client at a time: holds a lock on the folder, and what an earlier one left in it is cleared away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock: Optional[int] = None

    def open(self) -> None:
        """Take the folder. HsError if the capture is not there or another client is at work."""
        if not (self.folder / "want").is_dir():
            raise HsError(
                "{} is not the dump folder of a capture: no server made it".format(self.folder),
                "everything",
                "start the extraction server with SGLANG_HS_DUMP_DIR={} and look into its log".format(self.folder),
            )
        self._lock = lock(self.folder / ".client.lock", "the dump folder {}".format(self.folder))
        self._clear()

    def _clear(self) -> None:
        for name in ("want", "done", "used", "failed"):
            with contextlib.suppress(FileNotFoundError):
                for entry in list((self.folder / name).iterdir()):
                    remove(entry)
        remove(self.folder / "every_rank")

    def close(self) -> None:
        """Let the folder go, empty: a request that was given up may have had its dump written after all."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._clear()
            os.close(self._lock)
            self._lock = None

    def ranks(self) -> List[Dict[str, Any]]:
        """What every rank's capture says of itself; HsError where one refused or is missing."""
        folder = self.folder / "attached"
        refused = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("refused-rank*.json"))]
        if refused:
            raise HsError(
                "the capture refused this server: {}".format(refused[0].get("reason")),
                "everything",
                "start the extraction server as the reason says",
            )
        found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank*.json")]
        found.sort(key=lambda entry: int(entry["rank"]))
        size = found[0]["tp_size"] if found else 0
        if not found or [entry["rank"] for entry in found] != list(range(size)):
            raise HsError(
                "{} of {} ranks report a capture in {}".format(len(found), size or "?", folder),
                "everything",
                "is the server patched, and was it started with SGLANG_HS_DUMP_DIR?",
            )
        return found

    def check(self, spec: Spec) -> Dict[str, Any]:
        """Rank 0's report, after comparing every rank's with what the specification asks for."""
        ranks = self.ranks()
        wanted = {"boundaries": spec.boundaries, "final": spec.final, "hidden_size": spec.hidden_size}
        for entry in ranks:
            other = [
                "{}: {} instead of {}".format(key, entry.get(key), value)
                for key, value in wanted.items()
                if entry.get(key) != value
            ]
            if other:
                raise HsError(
                    "the capture on rank {} was set up otherwise ({})".format(entry["rank"], "; ".join(other)),
                    "everything",
                    "start the extraction server with the same settings",
                )
        return ranks[0]

    # -- one sequence --------------------------------------------------------------------------------------------------

    def wish(self, name: str, every_rank: bool = False) -> None:
        """Ask for the states of sequence ``name``; call before the request is sent."""
        self.forget(name)
        # whole or absent, but under a dot name that is no sequence's
        temporary, path = ("{}/want/{}{}".format(self.folder, mark, name) for mark in (".", ""))
        try:
            with open(temporary, "wb", buffering=0) as handle:
                handle.write(b"ranks" if every_rank else b"")
            os.replace(temporary, path)
        except OSError as error:
            raise OutputFault(
                self._full() or "no wish can be written to the dump folder {}: {}".format(self.folder, error),
                "the samples that are done; each is whole",
                "make room there (or mend it) and run again: it goes on where it stopped",
            ) from error

    def wait(self, name: str, patience: float, stop: Optional[Any] = None) -> Path:
        """The dump of ``name``, at most ``patience`` seconds after the server answered; SampleFault with the helper's reason."""
        return self.wait_file(name, self.folder / "done" / (name + ".safetensors"), "", patience)

    def wait_rank(self, name: str, rank: int, patience: float) -> Path:
        """Rank ``rank``'s own dump of a wish for every rank."""
        suffix = ".rank{}".format(rank) if rank else ""
        return self.wait_file(name, self.folder / "done" / "{}.rank{}.safetensors".format(name, rank), suffix, patience)

    def wait_file(self, name: str, done: Path, suffix: str, patience: float) -> Path:
        """``done`` once it is there; SampleFault with the reason that lies in failed/ instead, or for want of either; NoRoom where
        the folder is full."""
        failed = self.folder / "failed" / "{}{}.json".format(name, suffix)
        end = time.monotonic() + patience
        pause = 0.001
        while True:
            if done.exists():
                return done
            told = _told(failed)
            if told is not None:
                fault = NoRoom if told.get("no_room") else SampleFault
                raise fault("the capture wrote no dump: {}".format(told.get("reason")))
            if time.monotonic() >= end:
                hint, full = (_told(self.folder / "failed" / "unnamed.json") or {}).get("reason"), self._full()
                raise (NoRoom if full and not hint else SampleFault)(
                    "the server answered but no dump came within {:g} s ({})".format(
                        patience,
                        hint
                        or full
                        or "a CUDA graph replayed the prefill, a prompt cut by the server, or a stalled disk",
                    )
                )
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _full(self) -> Optional[str]:
        """What to say of a dump folder in which not even a reason has room."""
        info = os.statvfs(str(self.folder))
        full = info.f_bavail * info.f_frsize < NO_ROOM or info.f_files and not info.f_favail
        return "no space left in the dump folder {}".format(self.folder) if full else None

    def hand_back(self, name: str) -> None:
        """The sample is in its place: the capture may write the next dump over this one. Where it was moved there is nothing to hand back."""
        with contextlib.suppress(OSError):
            os.replace(*("{}/{}/{}.safetensors".format(self.folder, part, name) for part in ("done", "used")))

    def forget(self, name: str) -> None:
        """Remove the wish and whatever came of it."""
        # names put together as text: this runs twice for each sample, and pathlib takes longer than the kernel
        root = str(self.folder)
        for path in ("{}/want/{}", "{}/done/{}.safetensors", "{}/failed/{}.json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path.format(root, name))

    def forget_ranks(self, name: str, size: int) -> None:
        """Remove what ``size`` ranks wrote for ``name``."""
        for rank in range(size):
            remove(self.folder / "done" / "{}.rank{}.safetensors".format(name, rank))
            remove(self.folder / "failed" / "{}.rank{}.json".format(name, rank))

    @contextlib.contextmanager
    def every_rank(self) -> Any:
        """While inside, ranks other than 0 look for wishes too."""
        marker = self.folder / "every_rank"
        marker.touch(mode=0o600)
        try:
            yield
        finally:
            remove(marker)


def lock(path: Path, what: str) -> int:
    """An exclusive lock that ends with this process; HsError if another holds it."""
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise HsError(
            "another client is at work on {}".format(what),
            "everything, that client's work too",
            "wait for it to end, or stop it",
        ) from None
    return fd


def remove(path: Path) -> None:
    """Unlink a file that may not be there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()


def _told(path: Path) -> Optional[Dict[str, Any]]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
