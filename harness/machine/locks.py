"""File locks. The operating system releases a dead process's lock."""

import asyncio
import fcntl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO

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
