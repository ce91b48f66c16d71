"""Two servers never keep sessions in one file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.server.store.sqlite import SQLiteStore, read_sessions

OTHER_SERVER = """
import asyncio, sys
from pathlib import Path
from harness.server.store.sqlite import SQLiteStore

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


async def test_a_symlink_to_a_store_in_use_is_in_use(tmp_path: Path):
    """The claim is on the file, whatever the path to it is called, and a link to nothing yet claims what it names."""
    path, link, folder = tmp_path / "sessions.db", tmp_path / "link.db", tmp_path / "folder"
    link.symlink_to(path)
    folder.symlink_to(tmp_path, target_is_directory=True)
    async with SQLiteStore(link):
        for spelling in (path, folder / "sessions.db", folder / "link.db", tmp_path / "x" / ".." / "sessions.db"):
            with pytest.raises(StoreError, match="another server uses it"):
                await open_and_leave(spelling)


async def test_a_symlink_that_leads_to_itself_is_refused(tmp_path: Path):
    """By a sentence, as every path that cannot be opened."""
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    with pytest.raises(StoreError, match=r"loop\.db"):
        await open_and_leave(tmp_path / "loop.db")


async def test_a_store_that_cannot_be_opened_is_not_claimed(tmp_path: Path):
    """What is wrong with it can be put right while this process lives."""
    path = tmp_path / "sessions.db"
    path.write_bytes(b"something else entirely")
    with pytest.raises(StoreError, match="not a database"):
        await open_and_leave(path)
    path.unlink()
    await open_and_leave(path)


async def test_a_store_by_another_of_its_names_is_refused(tmp_path: Path):
    """Two servers would write one file and each a log of its own."""
    path, other = tmp_path / "sessions.db", tmp_path / "other.db"
    async with SQLiteStore(path):
        other.hardlink_to(path)
        with pytest.raises(StoreError, match=r"other\.db: expected a file without hard links"):
            await open_and_leave(other)
    other.unlink()
    await open_and_leave(path)
