"""Read access to a database, without long locks, writes, or new files next to it.

A database in use, or left by a killed process, is read with its log (WAL). The log stays: only a connection that may
write folds it into the file on close.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from harness.errors import StoreError

_BUSY_TIMEOUT_S = 10.0


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
