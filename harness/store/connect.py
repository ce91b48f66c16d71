"""From the name of a store to the store."""

import time
from pathlib import Path

from harness.machine.clock import Clock
from harness.store.base import SessionStore
from harness.store.memory import MemoryStore
from harness.store.sqlite import SQLiteStore


def open_store(where: str | Path, clock: Clock = time.time) -> SessionStore:
    """A store in the SQLite file `where`, or one that keeps nothing for `"memory"`; enter it to use it."""
    return MemoryStore() if where == "memory" else SQLiteStore(Path(where), clock=clock)
