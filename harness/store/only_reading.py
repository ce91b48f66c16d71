"""A database that is only read: nothing is locked for long, and nothing is written or left beside it.

Whoever has written to a database of ours has a log beside it until all of it is in the file. So one without a log is
read as a file that does not change. SQLite would else make a log and its index, which a folder that may only be read
refuses. Should somebody begin to write meanwhile and come so far as to change the file, what has been read may be of
two moments, and the reader is told so.

A database in use, or left by a process that was killed, is read with its log. That stays as it was: the last connection
that may write folds it into the file when it closes, and this one may not.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from harness.errors import StoreError

_BUSY_TIMEOUT_S = 10.0


@contextmanager
def only_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection to the database `path` that cannot write. Raises `StoreError`, `sqlite3.Error`, `OSError`."""
    file = path.resolve()  # as SQLite does: the log is beside what a link leads to
    log, index, journal = (file.with_name(file.name + suffix) for suffix in ("-wal", "-shm", "-journal"))
    before = _state(file)
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
            raise StoreError(f"{path}: somebody began to write it while it was read; look again")


def _state(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
