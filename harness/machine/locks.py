"""Locks on files: one process at a time.

The operating system releases the lock of a process that dies, so a stale one cannot exist.
"""

import asyncio
import fcntl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

_POLL_S = 0.2


def try_lock(file: IO[bytes]) -> bool:
    """Whether the lock on the open `file` is ours now, until it is closed; False when somebody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def hold_lock(path: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lock file at `path`, which is made when it is missing; blocks.

    `on_wait` is called once when somebody else has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not try_lock(file):
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@asynccontextmanager
async def hold_lock_async(path: Path, on_wait: Callable[[], object]) -> AsyncIterator[None]:
    """Like `hold_lock`, while the loop goes on. A wait for a lock cannot be cancelled: this looks repeatedly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        if not try_lock(file):
            on_wait()
            while not try_lock(file):  # noqa: ASYNC110  # another process has it, and tells nobody
                await asyncio.sleep(_POLL_S)
        yield
