"""Sessions of a run on an attached server, in the run's database.

Each row has the session's record, without tokens, and its number of sampled tokens, counted from the turns to check
the ledger.
"""

import sqlite3
from pathlib import Path
from typing import Any, Self

import msgspec

from harness.decoding import read_json
from harness.machine.disk import disk_failures
from harness.sessions.ledger import NOTHING_UNKNOWN, Unknown
from harness.suite.record.rollout_table import has_table, reading_run
from harness.types import Json

_BUSY_TIMEOUT_S = 10.0
_SCHEMA = "CREATE TABLE IF NOT EXISTS attached_sessions (session_id TEXT PRIMARY KEY, sampled INTEGER, record TEXT)"
_NOTE = "INSERT OR IGNORE INTO attached_sessions VALUES (?1, NULL, NULL)"
_FORGET = "DELETE FROM attached_sessions WHERE session_id = ?1 AND sampled IS NULL"
_KEEP = "INSERT OR REPLACE INTO attached_sessions VALUES (?1, ?2, ?3)"
_UNCOUNTED = "SELECT session_id FROM attached_sessions WHERE sampled IS NULL"
_COUNTED = "SELECT session_id, sampled FROM attached_sessions WHERE sampled IS NOT NULL"
_UNKNOWN = """
SELECT COALESCE(SUM(json_extract(record, '$.ledger.unknown.requests')), 0),
       COALESCE(SUM(json_extract(record, '$.ledger.unknown.tokens')), 0)
FROM attached_sessions WHERE record IS NOT NULL
"""
_RECORD = "SELECT record FROM attached_sessions WHERE session_id = ?1 AND record IS NOT NULL"


class AttachedSessions:
    """Table of sessions; a context manager. All methods raise `StoreError`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        with disk_failures(self._path):
            self._connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S)
            self._connection.execute(_SCHEMA)
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def note(self, session_id: str) -> None:
        """Note a session that is about to be created."""
        # Before the creation: a crash in between must not leave a session unnoted.
        self._write(_NOTE, session_id)

    def forget(self, session_id: str) -> None:
        """Remove a session that the server refused."""
        self._write(_FORGET, session_id)

    def keep(self, session_id: str, session: Json) -> None:
        """Store the session's record, and count its tokens. The last record wins."""
        self._write(_KEEP, session_id, _count_sampled(session), msgspec.json.encode(session).decode())

    def give_up(self, session_id: str) -> None:
        """Count a session that the server lost as empty."""
        self._write(_KEEP, session_id, 0, None)

    def list_uncounted(self) -> list[str]:
        """Return the sessions that may hold uncounted tokens."""
        with disk_failures(self._path):
            rows = self._connection.execute(_UNCOUNTED).fetchall()
        return [session_id for (session_id,) in rows]

    def _write(self, statement: str, *values: object) -> None:
        with disk_failures(self._path), self._connection:
            self._connection.execute(statement, values)


def count_attached(connection: sqlite3.Connection) -> dict[str, int]:
    return dict(connection.execute(_COUNTED)) if has_table(connection, "attached_sessions") else {}


def read_attached_unknown(connection: sqlite3.Connection) -> Unknown:
    """Sum the `unknown` requests of the sessions' ledgers."""
    if not has_table(connection, "attached_sessions"):
        return NOTHING_UNKNOWN
    return Unknown(*connection.execute(_UNKNOWN).fetchone())


def read_attached_record(path: Path, session_id: str) -> Json | None:
    """Read a session's record; None if it was not on an attached server."""
    with reading_run(path) as connection:
        if not has_table(connection, "attached_sessions"):
            return None
        row = connection.execute(_RECORD, (session_id,)).fetchone()
    return None if row is None else read_json(row[0], dict[str, Any])


def _count_sampled(session: Json) -> int:
    own = [turn for turn in session["turns"] if not turn["notes"].get("inherited")]
    return sum(int(turn["output_length"]) + sum(int(each["tokens"]) for each in turn["discarded"]) for turn in own)
