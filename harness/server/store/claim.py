"""Exclusive use of a store by one server: a second server would sample turns that the first does not know about.

A claim is an OS lock on a file beside the store, so it ends with its process. It follows symlinks. Readers need no
claim.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from harness.errors import StoreError
from harness.machine.disk import try_lock


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
