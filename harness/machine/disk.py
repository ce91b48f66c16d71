"""The disk: its failures have names, a full one apart from a broken one, what was written survives a power cut, and
what an agent has left is read as what it is.
"""

import errno
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO

from harness.errors import StoreError, StoreFull

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def disk_failures(path: Path) -> Iterator[None]:
    """Errors of the operating system or SQLite about `path` become a `StoreError`, or a `StoreFull`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(path) from error
        raise StoreError(f"{error.filename or path}: {error.strerror or error}") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            raise disk_full(path) from error
        raise StoreError(f"{path}: {error}") from error


def disk_full(path: Path) -> StoreFull:
    """The error of a full disk under `path`."""
    return StoreFull(f"{os.strerror(errno.ENOSPC)}: {path}; free some space, then resume the run")


def sync(path: Path) -> None:
    """Have the content of the file at `path`, or the names in the folder, survive a power cut. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A file of UTF-8 that takes the place of `path` when the block ends well, and is gone otherwise.

    Whoever else writes there at that time has a file of his own, and the last one to end is what stays. Raises
    `OSError`.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with scratch.open("x", encoding="utf-8", newline="\n") as file:
            yield file
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def open_left_behind(path: Path) -> BinaryIO:
    """The regular file that an agent may have left at `path`, to read.

    No link is followed, which would lead to what the agent may not read, and no writer of a pipe is waited for. Raises
    `OSError`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
