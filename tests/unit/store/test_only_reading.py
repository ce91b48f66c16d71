"""Looking at a database leaves its folder as it was, and never tells of two moments at once."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.server.store.file_access import only_reading


@pytest.fixture(name="database")
def _database(tmp_path: Path) -> Path:
    """A database in WAL mode with one row, which nobody has open."""
    path = tmp_path / "folder" / "a.db"
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("PRAGMA journal_mode = WAL; CREATE TABLE words (word); INSERT INTO words VALUES ('x')")
    os.utime(path, (1, 1))
    return path


@pytest.fixture(name="killed")
def _killed(database: Path, tmp_path: Path) -> Path:
    """A copy of it that says more, in a log that nobody has folded into it."""
    with closing(sqlite3.connect(database)) as connection:
        write(connection)
        shutil.copytree(database.parent, tmp_path / "killed")
    return tmp_path / "killed" / database.name


def write(connection: sqlite3.Connection) -> None:
    connection.execute("INSERT INTO words VALUES ('y')")
    connection.commit()


def words(path: Path) -> list[str]:
    with only_reading(path) as connection:
        return [word for (word,) in connection.execute("SELECT word FROM words ORDER BY word")]


def content(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in folder.iterdir()}


@pytest.fixture(name="readable_only")
def _readable_only(database: Path) -> Iterator[Path]:
    database.parent.chmod(0o555)
    yield database
    database.parent.chmod(0o755)


def test_a_folder_that_may_only_be_read_stays_as_it_is(readable_only: Path):
    """No log and no index appear, also where one may write."""
    before = content(readable_only.parent)

    assert words(readable_only) == ["x"]
    assert content(readable_only.parent) == before


def test_what_a_killed_process_left_in_the_log_is_read_and_stays_there(killed: Path):
    """Neither the file nor its log is another afterwards."""
    log = killed.with_name("a.db-wal")
    before = killed.read_bytes(), log.read_bytes()

    assert words(killed) == ["x", "y"]
    assert (killed.read_bytes(), log.read_bytes()) == before


def test_a_log_whose_index_cannot_be_made_is_not_passed_over(killed: Path):
    """What it holds would be missing, and nobody would know."""
    index = killed.with_name("a.db-shm")
    index.unlink()
    index.symlink_to("nowhere")

    with pytest.raises(StoreError, match=r"copy it with a\.db-wal to a folder that can be written"):
        words(killed)


def test_a_file_that_is_written_meanwhile_is_refused(database: Path):
    """By somebody who had not opened it when the reader began; the next look succeeds."""

    def read_and_write() -> None:
        with only_reading(database) as reader:
            assert len(reader.execute("SELECT * FROM words").fetchall()) == 1
            with closing(sqlite3.connect(database)) as writer:
                write(writer)

    with pytest.raises(StoreError, match="try again"):
        read_and_write()
    assert words(database) == ["x", "y"]


def test_who_only_has_a_log_meanwhile_disturbs_nobody(database: Path):
    with closing(sqlite3.connect(database)) as writer:
        with only_reading(database) as reader:
            write(writer)
            assert len(reader.execute("SELECT * FROM words").fetchall()) == 1
        assert words(database) == ["x", "y"]


def test_the_log_of_what_a_link_leads_to_is_read(killed: Path, tmp_path: Path):
    """It is beside that file, not beside the link."""
    (tmp_path / "link").symlink_to(killed)

    assert words(tmp_path / "link") == ["x", "y"]
