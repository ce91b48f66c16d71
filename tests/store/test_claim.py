"""Two servers never keep sessions in one file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.store.sqlite import SQLiteStore, read_sessions

OTHER_SERVER = """
import asyncio, sys
from pathlib import Path
from harness.store.sqlite import SQLiteStore

async def main():
    async with SQLiteStore(Path(sys.argv[1])):
        print("claimed", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def open_and_leave(path: Path) -> None:
    async with SQLiteStore(path):
        pass


async def test_a_store_that_another_process_serves_is_refused_until_that_process_is_dead(tmp_path: Path):
    """A killed server leaves no claim behind; readers are not held up by one."""
    path = tmp_path / "sessions.db"
    with subprocess.Popen([sys.executable, "-c", OTHER_SERVER, str(path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == b"claimed\n"
            with pytest.raises(StoreError, match=r"sessions\.db: another server uses it; stop that one"):
                await open_and_leave(path)
            assert read_sessions(path) == []
        finally:
            os.kill(other.pid, signal.SIGKILL)
    await open_and_leave(path)


async def test_a_store_is_free_again_when_it_is_left(tmp_path: Path):
    """However often, and also after an attempt that was refused."""
    path = tmp_path / "sessions.db"
    async with SQLiteStore(path):
        with pytest.raises(StoreError, match="another server uses it"):
            await open_and_leave(path)
    await open_and_leave(path)


async def test_a_store_that_cannot_be_opened_is_not_claimed(tmp_path: Path):
    """What is wrong with it can be put right while this process lives."""
    path = tmp_path / "sessions.db"
    path.write_bytes(b"something else entirely")
    with pytest.raises(StoreError, match="not a database"):
        await open_and_leave(path)
    path.unlink()
    await open_and_leave(path)
