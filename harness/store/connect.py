"""From the name of a store to the store."""

from pathlib import Path

from harness.store.base import SessionStore
from harness.store.memory import MemoryStore
from harness.store.sqlite import SQLiteStore


def open_store(where: str | Path) -> SessionStore:
    """A store in the SQLite file `where`, or one that keeps nothing for `"memory"`; enter it to use it."""
    return MemoryStore() if where == "memory" else SQLiteStore(Path(where))
