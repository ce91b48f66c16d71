"""Access to the file of a database: by one server alone, or by any reader.

A second server would sample turns that the first does not know about. Its claim is an OS lock on a file beside the
store, so it ends with its process. It follows symlinks. Readers need no claim.

A reader leaves no long locks, writes, or new files. A database in use, or left by a killed process, is read with its
log (WAL). The log stays: only a connection that may write folds it into the file on close.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import BinaryIO

from harness.errors import StoreError
from harness.machine.disk import try_lock

_BUSY_TIMEOUT_S = 10.0


def claim(store: Path) -> BinaryIO:
    """Claim `store` until the returned file is closed. Raises `StoreError` if another server holds it."""
    try:
        target = store.resolve()
        if not target.parent.is_dir():
            raise StoreError(f"{store}: no such directory: {target.parent}")
        # SQLite keeps one log per name of a file.
        if target.is_file() and (names := target.stat().st_nlink) > 1:
            raise StoreError(f"{store}: expected a file without hard links, it has {names} names; use a copy")
        with ExitStack() as stack:
            file = stack.enter_context(target.with_name(f"{target.name}-claim").open("ab"))
            if not try_lock(file):
                raise StoreError(f"{store}: another server uses it; stop that one, or name another file")
            stack.pop_all()
            return file
    except (OSError, RuntimeError) as error:  # RuntimeError: a symlink loop
        raise StoreError(f"{store}: it cannot be claimed: {getattr(error, 'strerror', error)}") from error


@contextmanager
def only_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect to the database `path` without write access. Raises `StoreError`, `sqlite3.Error`, `OSError`."""
    file = path.resolve()  # as SQLite does: the log is next to the target of a symlink
    log, index, journal = (file.with_name(file.name + suffix) for suffix in ("-wal", "-shm", "-journal"))
    before = _state(file)
    # A writer keeps a log next to the database until all of it is in the file. A database without one is opened as
    # immutable: otherwise SQLite would create a log and its index, which a read-only folder refuses. If a writer then
    # changes the file, the reads may mix two states, so the block fails.
    is_still = not log.exists() and not journal.exists()
    uri = f"{file.as_uri()}?mode=ro{'&immutable=1' if is_still else ''}"
    try:
        with closing(sqlite3.connect(uri, timeout=_BUSY_TIMEOUT_S, uri=True)) as connection:
            yield connection
    except sqlite3.OperationalError as error:
        if log.exists() and not index.is_file():
            raise StoreError(
                f"{path}: the index of its log is missing and cannot be made here; copy it with {log.name} to a folder"
                " that can be written, and look there"
            ) from error
        raise
    finally:
        if is_still and _state(file) != before:
            raise StoreError(f"{path}: another process began to write it while it was read; try again")


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
