"""Small files that are whole or absent: JSON written to a temporary name, fsynced, renamed; a mutex by flock."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator

from .errors import HsError


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """Replace ``path`` by ``text`` so that a reader, or a crash, sees the old file or the new one and nothing between."""
    fd, temporary = tempfile.mkstemp(prefix=".{}.".format(path.name), dir=str(path.parent))
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as handle:
            os.fchmod(handle.fileno(), mode)
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, str(path))
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.errno and not error.filename:  # a full disk does not say where
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and unlinks in ``folder`` survive a power cut."""
    fd = os.open(str(folder), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_json(path: Path, document: Any, mode: int = 0o600) -> None:
    """:func:`write_text` of ``document``, readable by its owner only unless told otherwise."""
    write_text(path, json.dumps(document, indent=1, sort_keys=True) + "\n", mode)


def read_json(path: Path) -> Any:
    """The document in ``path``, or None where there is no such file; a broken one is an HsError that names it."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise HsError(
            "{} is not readable as JSON ({})".format(path, error),
            "the file and everything else on the host",
            "look at it; it was written by this project whole, so something else changed it",
        ) from error


@contextlib.contextmanager
def mutex(path: Path, patience: float = 0.0, holder: str = "") -> Iterator[None]:
    """Hold an exclusive flock on ``path`` (it dies with its holder); wait up to ``patience`` seconds for it.

    ``holder``: written into the file while it is held, for whoever finds it held.
    """
    end = time.monotonic() + patience
    fd = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise HsError(
                        "another step of this project is at work on this host (it holds {})".format(path),
                        "everything",
                        "wait for it to end, then try again",
                    ) from None
                time.sleep(0.1)
        if holder:
            with contextlib.suppress(OSError):  # a full disk; then nobody learns who holds it
                os.ftruncate(fd, 0)
                os.pwrite(fd, holder.encode(), 0)
        yield
    finally:
        os.close(fd)


def held(path: Path) -> bool:
    """Whether somebody holds the :func:`mutex` on ``path`` at this moment."""
    try:
        with mutex(path):
            return False
    except HsError:
        return True
