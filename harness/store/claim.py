"""One server at a time keeps sessions in a store: a second one would sample turns that the first knows nothing of.

A claim is a lock of the operating system on a file beside the store, so it ends with its process, however that ends.
Whoever only reads a store needs no claim.
"""

import fcntl
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from harness.errors import StoreError


def claim(store: Path) -> BinaryIO:
    """Claim `store` until the returned file is closed. Raises `StoreError` when another server has it."""
    if not store.parent.is_dir():
        raise StoreError(f"{store}: no such directory: {store.parent}")
    try:
        with ExitStack() as stack:
            file = stack.enter_context(store.with_name(f"{store.name}-claim").open("ab"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            stack.pop_all()
            return file
    except BlockingIOError as error:
        raise StoreError(f"{store}: another server uses it; stop that one, or name another file") from error
    except OSError as error:
        raise StoreError(f"{store}: it cannot be claimed: {error.strerror}") from error
