"""Locks that end with the process that holds them, however it ends: the kernel's own (flock).

Their limits: over NFS, Linux asks the server, so that other machines see them, unless the mount says otherwise
(`nolock`, `local_lock=flock`): then only processes of one machine see each other. A file system without locks keeps
nobody out, and that is said. A process that was forked, not started anew, holds its parent's locks until it ends too.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = ".owner"  # the file that is locked


class Held(Exception):
    """Another process has the lock."""


class NoLocks(Exception):
    """This file system, or this machine, has none."""


def lock(path: Path) -> int:
    """Locks a file, which is made if need be; whoever closes the descriptor that is returned, or ends, lets it go."""
    try:
        import fcntl
    except ImportError:
        raise NoLocks(f"{os.name} has no flock") from None
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(errno.EINVAL, "expected a file, got a pipe or a device", str(path))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            raise Held if isinstance(error, BlockingIOError) else NoLocks(error.strerror) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.lstat()):
                return handle
        os.close(handle)  # whoever had it has removed the file meanwhile


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Inside, this process is the folder's one owner. A folder that has another is refused, with who that is.

    It is made if need be, and is gone afterwards if it was made for nothing.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / OWNER
    try:
        handle = lock(path)
    except Held:
        raise ValueError(
            f"{str(folder)!r} is in use by {_holder(path)}: wait until that ends, or choose another --out"
        ) from None
    except NoLocks as error:
        warnings.warn(f"{str(folder)!r} cannot be locked ({error}): nothing keeps a second run out of it", stacklevel=3)
        yield
        return
    try:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}) + "\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
        os.fsync(handle)  # over NFS, so that other machines can read it
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes: nobody else may have it by then
        os.close(handle)
        if made:
            with suppress(OSError):  # there is something in it
                folder.rmdir()


def _holder(path: Path) -> str:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return f"process {int(found['pid'])} on {found['host']!r} since {found['since']!r}"
    except (OSError, ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return "another process"
