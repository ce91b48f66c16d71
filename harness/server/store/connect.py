"""Choice of the store implementation by name."""

import time
from pathlib import Path

from harness.machine.clock import Clock
from harness.server.store.base import SessionStore
from harness.server.store.memory import MemoryStore
from harness.server.store.sqlite import SQLiteStore


def open_store(where: str | Path, clock: Clock = time.time) -> SessionStore:
    """Return a SQLite store for a path, or a `MemoryStore` for `"memory"`. Enter it before use."""
    return MemoryStore() if where == "memory" else SQLiteStore(Path(where), clock=clock)
