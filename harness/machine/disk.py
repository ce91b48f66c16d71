"""Durable files, locks, typed disk errors, and files of agents: read, replaced and removed without following links."""

import asyncio
import errno
import fcntl
import os
import secrets
import sqlite3
import stat
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from harness.errors import StoreError, StoreFull

_REMOVE_S = 120.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def disk_failures(path: Path) -> Iterator[None]:
    """Convert `OSError` and SQLite errors to `StoreError` or `StoreFull`."""
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
    return StoreFull(f"{os.strerror(errno.ENOSPC)}: {path}; free some space, then resume the run")


def sync(path: Path) -> None:
    """Flush a file or folder to disk. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begins_with(path: Path, text: str) -> bool:
    """Return True for a file that may be replaced: one with this beginning, not another that was named by mistake."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(text)) == text.encode()
    return False


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Yield a UTF-8 file that replaces `path` if the block succeeds. Raises `OSError`."""
    # A file per writer: the last one wins.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with scratch.open("x", encoding="utf-8", newline="\n") as file:
            yield file
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def open_left_behind(path: Path) -> BinaryIO:
    """Open an agent's regular file. Raises `OSError`."""
    # A link may lead to files that the agent cannot read, and a pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def make_way(path: Path) -> None:
    """Remove a file, link or folder of an agent. Failures leave it."""
    if path.is_dir() and not path.is_symlink():
        # Not `shutil.rmtree`, which recurses: an agent may nest a thousand folders.
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(("rm", "-rf", "--", path), timeout=_REMOVE_S, check=False, stderr=subprocess.DEVNULL)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def make_way_below(folder: Path, name: str) -> Path:
    """Return the path `name` in an agent's `folder`, after `make_way`, without links in it. Raises `OSError`."""
    target = folder / name
    for parent in reversed(target.relative_to(folder).parents[:-1]):
        if (folder / parent).is_symlink():
            (folder / parent).unlink()
    make_way(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


_POLL_S = 0.2


def try_lock(file: IO[bytes]) -> bool:
    """Lock `file` until it is closed. Return False if it is taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock file at `path`; blocks while it is taken, after calling `on_wait`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not try_lock(file):
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@asynccontextmanager
async def hold_lock_async(path: Path, on_wait: Callable[[], object]) -> AsyncIterator[None]:
    """Hold a lock while the loop continues."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not try_lock(file):
            on_wait()
            while not try_lock(file):  # noqa: ASYNC110  # a blocking wait could not be cancelled
                await asyncio.sleep(_POLL_S)
        yield
