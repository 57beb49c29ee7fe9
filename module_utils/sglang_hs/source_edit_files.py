"""Files, for :mod:`source_edit`: read one, say why it cannot be replaced, replace it with everything kept, lock it.

Standard library only. Nothing here knows what is in the file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import importlib.util
import os
import re
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from .errors import HsError
from .fsio import sync_folder

MAX_BYTES = 16 * 1024 * 1024
LOCK_WAIT_S = 30.0

# FS_IOC_GETFLAGS, _IOR('f', 1, long): the attributes that lsattr shows. Linux's own number for the common processors;
# where it is another one the call fails and we learn of an immutable file from the rename instead.
_FS_IOC_GETFLAGS = 0x80006601 | (struct.calcsize("l") << 16)
_FS_IMMUTABLE, _FS_APPEND = 0x10, 0x20

# A signature of the content: copied onto other content it would make the file unreadable.
_CONTENT_BOUND_XATTRS = ("security.ima", "security.evm")

_UNSUPPORTED = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTTY)


class EditRefused(HsError):
    """The edit was refused: what happened, what was left as it was, what to do next.

    ``reason`` is one short word for programs and tests, ``str(error)`` is for people.
    """

    def __init__(self, reason: str, what: str, todo: str, left: str = "the file, as it was found") -> None:
        super().__init__(what, left, todo)
        self.reason = reason


@contextlib.contextmanager
def plain_words(doing: str) -> Iterator[None]:
    """Turn an operating system error inside the block into an :class:`EditRefused`."""
    try:
        yield
    except OSError as error:
        named = ": {}".format(error.filename) if error.filename else ""
        raise EditRefused(
            "os_error",
            "While {}: {}{}.".format(doing, error.strerror or error, named),
            "Look at that place, then run again.",
        ) from error


def sha256(data: bytes) -> str:
    """The hash by which a whole file is known, in hex."""
    return hashlib.sha256(data).hexdigest()


def read_regular(path: str) -> Tuple[bytes, os.stat_result]:
    """The bytes of a regular file and its stat.

    Raises EditRefused for anything else than a regular file (a named pipe is never opened: it would block), for a
    file of more than 16 MiB, and for one that cannot be read.
    """
    with plain_words("reading {}".format(path)):
        kind = os.stat(path).st_mode
        if not stat.S_ISREG(kind):
            what = "a folder" if stat.S_ISDIR(kind) else "not a regular file"
            raise EditRefused("not_a_file", "{} is {}.".format(path, what), "Name a Python source file.")
        with open(path, "rb") as handle:
            info = os.fstat(handle.fileno())
            if info.st_size > MAX_BYTES:
                raise EditRefused(
                    "too_large", "{} has {} bytes.".format(path, info.st_size), "No source file is that large."
                )
            return handle.read(), info


# -- may it be replaced? -----------------------------------------------------------------------------------------------


def why_not_replaceable(real: str, info: os.stat_result) -> Optional[Tuple[str, str]]:
    """None, or (what is in the way, what to do about it). Asked before anything is written, in check mode too."""
    folder = os.path.dirname(real)
    for place, what in ((real, "The file"), (folder, "The folder of the file")):
        flags = _inode_flags(place)
        if flags & (_FS_IMMUTABLE | _FS_APPEND):
            letter = "i" if flags & _FS_IMMUTABLE else "a"
            return (
                "{} carries the {} attribute: {}.".format(what, "immutable" if letter == "i" else "append-only", place),
                "Whoever set it meant it; take it away with: chattr -{} '{}'".format(letter, place),
            )
    if real in _mount_points():
        return (
            "{} is a mount point of its own (a bind mount onto one file) and cannot be replaced in one step.".format(
                real
            ),
            "Edit the file where it is mounted from, or unmount it.",
        )
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return (
            "The folder {} cannot be written by user {} (a writable file is not enough: it is replaced by a rename)."
            "".format(folder, os.geteuid()),
            "Run as the folder's owner or as root; a file system mounted read-only has to be remounted.",
        )
    euid = os.geteuid()
    if euid != 0:
        groups = set(os.getgroups()) | {os.getegid()}
        if info.st_uid != euid or info.st_gid not in groups:
            return (
                "{} belongs to user {} and group {}; replaced by user {} it would change its owner.".format(
                    real, info.st_uid, info.st_gid, euid
                ),
                "Run as its owner or as root.",
            )
    held = [name for name in _xattrs(real) if name in _CONTENT_BOUND_XATTRS]
    if held:
        return (
            "{} is signed by the kernel's integrity measurement ({}).".format(real, ", ".join(held)),
            "An edit would break the signature; use a way in that edits no file.",
        )
    for cache in {os.path.dirname(name) for name in compiled_files([real])}:
        if not os.access(cache, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return (
                "The compiled copies in {} cannot be removed by user {}: old code could run.".format(cache, euid),
                "Run as the folder's owner or as root.",
            )
    return None


def _inode_flags(path: str) -> int:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return int(struct.unpack("i", fcntl.ioctl(handle, _FS_IOC_GETFLAGS, b"\0" * 8)[:4])[0])
    except OSError:
        return 0
    finally:
        os.close(handle)


def _mount_points() -> List[str]:
    try:
        with open("/proc/self/mountinfo", "rb") as handle:
            fields = [line.split(b" ")[4] for line in handle]
    except (OSError, IndexError):
        return []
    # The kernel writes a space, tab, newline or backslash in a path as three octal digits.
    return [os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m.group(1), 8)]), name)) for name in fields]


# -- compiled copies ---------------------------------------------------------------------------------------------------


def compiled_files(paths: Sequence[str]) -> List[str]:
    """Every compiled copy of these sources, of whichever interpreter, optimised or not.

    Python trusts a compiled copy by the source's size and its mtime in whole seconds (and an "unchecked" one by
    nothing at all), so an old one can outlive its source.
    """
    found = set()
    for path in paths:
        cached = {os.path.join(os.path.dirname(path), "__pycache__")}
        if sys.pycache_prefix:
            cached.add(os.path.dirname(importlib.util.cache_from_source(path)))
        stem = os.path.splitext(os.path.basename(path))[0]
        for folder in cached:
            found.update(glob.glob(os.path.join(glob.escape(folder), glob.escape(stem) + ".*.pyc")))
    return sorted(found)


def remove_compiled(paths: Sequence[str]) -> int:
    """Remove them and say how many there were."""
    count = 0
    for name in compiled_files(paths):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
            count += 1
    return count


# -- replace -----------------------------------------------------------------------------------------------------------


def replace_bytes(
    real: str,
    expected: str,
    data: bytes,
    mtime_ns: Optional[int] = None,
    other_mtimes_ns: Sequence[int] = (),
) -> None:
    """Replace the content of ``real`` by ``data`` in one step, if it still has the hash ``expected``.

    Owner, mode, extended attributes (an ACL and an SELinux label are such) are the old file's. The mtime is
    ``mtime_ns``; without one it is the present time, moved on by seconds until it differs from the old file's and
    from ``other_mtimes_ns`` in the whole second by which Python knows a compiled copy.
    Raises EditRefused when anything of this cannot be done; the old file then still stands.
    """
    folder, name = os.path.split(real)
    temporary = os.path.join(folder, ".{}.source_patch-{}.tmp".format(name, os.urandom(6).hex()))
    try:
        with plain_words("writing the new {}".format(real)):
            info = os.stat(real)
            handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _write_all(handle, data)
                made = os.fstat(handle)
                if (made.st_uid, made.st_gid) != (info.st_uid, info.st_gid):
                    os.fchown(handle, info.st_uid, info.st_gid)
                os.fchmod(handle, stat.S_IMODE(info.st_mode))
                _copy_xattrs(real, temporary)
                if mtime_ns is None:
                    mtime_ns = _fresh_mtime([info.st_mtime_ns, *other_mtimes_ns])
                os.utime(temporary, ns=(info.st_atime_ns, mtime_ns))
                os.fsync(handle)
            finally:
                os.close(handle)
        current, now = read_regular(real)
        if sha256(current) != expected or (now.st_dev, now.st_ino) != (info.st_dev, info.st_ino):
            raise EditRefused(
                "changed_meanwhile",
                "{} was changed by somebody else while the edit was prepared.".format(real),
                "Find out who edits it (a package upgrade?), then run again.",
                left="that change; nothing was written",
            )
        with plain_words("replacing {}".format(real)):
            os.rename(temporary, real)
            sync_folder(Path(folder))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def leftovers(real: str) -> List[str]:
    """Temporary files that a killed run left beside ``real`` (their names end in .tmp: Python never imports them)."""
    folder, name = os.path.split(real)
    pattern = ".{}.source_patch-".format(glob.escape(name)) + "[0-9a-f]" * 12 + ".tmp"
    return sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))


def _fresh_mtime(taken_ns: Sequence[int]) -> int:
    mtime = time.time_ns()
    while mtime // 10**9 in {value // 10**9 for value in taken_ns}:
        mtime += 10**9
    return mtime


def _xattrs(path: str) -> Dict[str, bytes]:
    try:
        names = os.listxattr(path)
    except AttributeError:  # not Linux
        return {}
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return {}
        raise
    found = {}
    for name in names:
        with contextlib.suppress(OSError):  # listed but not ours to read: not ours to copy either
            found[name] = os.getxattr(path, name)
    return found


def _copy_xattrs(source: str, target: str) -> None:
    wanted, present = _xattrs(source), _xattrs(target)
    for name, value in wanted.items():
        if present.get(name) == value:
            continue
        try:
            os.setxattr(target, name, value)
        except OSError as error:
            raise EditRefused(
                "attribute_lost",
                "The extended attribute {} of {} cannot be kept ({}).".format(name, source, error.strerror),
                "Run as root, or take the attribute away.",
            ) from error
    for name in set(present) - set(wanted):  # for instance an ACL inherited from the folder
        try:
            os.removexattr(target, name)
        except OSError:
            if not name.startswith("security."):  # the kernel's own label for a new file
                raise


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


# -- the backup folder -------------------------------------------------------------------------------------------------


def check_backup_dir(backup_dir: str, real: str, owner: int) -> str:
    """The real path of the backup folder. It need not exist yet.

    Raises EditRefused for a folder inside the package or site-packages (a backup there would be packaged, scanned or
    imported) and for one in which a stranger could plant a file.
    """
    todo = "Give a folder of its own outside the package, for instance /var/lib/<name>/backup."
    if not os.path.isabs(backup_dir):
        raise EditRefused("backup_dir", "backup_dir {!r} is not an absolute path.".format(backup_dir), todo)
    place = os.path.realpath(backup_dir)
    parts = set(place.split(os.sep))
    ancestors = [place]
    while os.path.dirname(ancestors[-1]) != ancestors[-1]:
        ancestors.append(os.path.dirname(ancestors[-1]))
    if (
        os.path.dirname(real) in ancestors
        or parts & {"site-packages", "dist-packages", "__pycache__"}
        or any(os.path.exists(os.path.join(folder, "__init__.py")) for folder in ancestors)
    ):
        raise EditRefused("backup_dir", "backup_dir {} lies inside a Python package.".format(place), todo)
    with plain_words("looking at backup_dir {}".format(place)):
        existing = next(folder for folder in ancestors if os.path.lexists(folder))
        info = os.stat(existing)
        if not stat.S_ISDIR(info.st_mode):
            raise EditRefused("backup_dir", "{} is not a folder.".format(existing), todo)
        if existing == place and (info.st_mode & stat.S_IWOTH or info.st_uid not in (0, os.geteuid(), owner)):
            raise EditRefused(
                "backup_dir",
                "backup_dir {} can be written by other users: a backup there could be anybody's.".format(place),
                todo,
            )
    return place


def why_not_writable(folder: str) -> Optional[str]:
    """None, or why nothing can be created in this folder, which need not exist yet."""
    existing = folder
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return "{} cannot be written by user {}".format(existing, os.geteuid())
    return None


def write_new(path: str, data: bytes, like: os.stat_result, mtime_ns: Optional[int]) -> None:
    """Create a file that must not exist: whole under its name, or not there at all. FileExistsError if it exists.

    It gets the owner and mode of ``like`` as far as this user may give them, so that a person may copy it back.
    """
    temporary = "{}.{}.tmp".format(path, os.urandom(6).hex())
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            _write_all(handle, data)
            with contextlib.suppress(PermissionError):
                os.fchown(handle, like.st_uid, like.st_gid)
            os.fchmod(handle, stat.S_IMODE(like.st_mode) & 0o777)
            mtime_ns = like.st_mtime_ns if mtime_ns is None else mtime_ns
            os.utime(temporary, ns=(like.st_atime_ns, mtime_ns))
            os.fsync(handle)
        finally:
            os.close(handle)
        os.link(temporary, path)  # unlike a rename, a link never replaces what is there
        sync_folder(Path(path).parent)
    finally:
        os.unlink(temporary)


# -- locks -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(real: str) -> Iterator[bool]:
    """Hold the lock of the file's folder; yields False where the file system has no such locks (some NFS).

    The lock is on the folder itself: it survives the rename of the file, makes no litter beside it, and two callers
    with different backup folders still exclude each other. Raises EditRefused after ``LOCK_WAIT_S`` seconds.
    """
    folder = os.path.dirname(real)
    with plain_words("locking {}".format(folder)):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        held = True
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                    held = False
                    break
            if time.monotonic() > until:
                raise EditRefused(
                    "locked",
                    "Another edit in {} has been under way for {:.0f} s.".format(folder, LOCK_WAIT_S),
                    "Wait for it, or see who holds the folder with: fuser -v '{}'".format(folder),
                )
            time.sleep(0.05)
        yield held
    finally:
        os.close(handle)
