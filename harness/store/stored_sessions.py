"""What a store holds of each session, in numbers; and closed sessions given back by name: for the books of a run.

The database of a run is the store of its server and has tables of the run beside it, so whoever keeps the books does it
in one transaction with them, on a connection of its own. Nothing here needs the claim on the store: sessions are
counted, and of those that are closed, which no server holds or writes any more, rows go.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.sessions.ledger import Unknown
from harness.sessions.lifecycle import CloseReason, Phase


class StoredSession(NamedTuple):
    """A session of a store, in numbers."""

    session_id: str
    closed_at: float | None
    """Seconds since the epoch; None of one that is not closed."""
    is_taken_over: bool
    """Its tokens are those of its successor, those that it left behind included."""
    generated: int
    """Sampled tokens: of its turns, discarded ones included, and what a predecessor left behind."""
    unknown: Unknown


_COUNT = """
SELECT session_id, phase, closed_at, closed_because,
       COALESCE(SUM(length(output_ids) / 4 + (
           SELECT COALESCE(SUM(json_extract(value, '$.tokens')), 0) FROM json_each(discarded)
       )), 0) + COALESCE(json_extract(config, '$.left_behind'), 0) AS generated,
       COALESCE(SUM(json_array_length(turns.unknown)), 0)
           + COALESCE(json_extract(config, '$.unknown_left_behind.requests'), 0) AS requests,
       COALESCE(SUM((SELECT COALESCE(SUM(json_extract(value, '$.at_most')), 0) FROM json_each(turns.unknown))), 0)
           + COALESCE(json_extract(config, '$.unknown_left_behind.tokens'), 0) AS tokens
FROM sessions LEFT JOIN turns USING (session_id)
WHERE session_id IN (
    SELECT session_id FROM sessions WHERE phase != 'closed'
    UNION ALL SELECT session_id FROM sessions WHERE phase = 'closed' AND closed_at >= ?
)
GROUP BY session_id
"""
_IS_STORE = "SELECT 1 FROM sqlite_master WHERE name = 'turns'"
_TAKEN_OVER = """
SELECT session_id FROM sessions WHERE phase = 'closed' AND closed_because = 'taken_over' AND closed_at < ?
"""
_IS_CLOSED = "SELECT 1 FROM sessions WHERE session_id = ? AND phase = 'closed'"
_DELETE = ("DELETE FROM turns WHERE session_id = ?", "DELETE FROM sessions WHERE session_id = ?")


def count_sessions(connection: sqlite3.Connection, closed_since: float = 0.0) -> Iterator[StoredSession]:
    """The sessions of the store in the database of `connection` that are not closed, or have been only since then.

    None when there is no store in it. Raises `sqlite3.Error`.
    """
    if not connection.execute(_IS_STORE).fetchone():
        return
    found = connection.execute(_COUNT, (closed_since,))
    for session_id, phase, closed_at, because, generated, requests, tokens in found:
        yield StoredSession(
            session_id,
            closed_at if phase == Phase.CLOSED else None,
            phase == Phase.CLOSED and because == CloseReason.TAKEN_OVER,
            generated,
            Unknown(requests, tokens),
        )


def find_taken_over(connection: sqlite3.Connection, before: float) -> list[str]:
    """The sessions that were taken over before then, and hold nothing that their successors do not account for.

    Raises `sqlite3.Error`.
    """
    if not connection.execute(_IS_STORE).fetchone():
        return []
    return [session_id for (session_id,) in connection.execute(_TAKEN_OVER, (before,))]


def forget_sessions(connection: sqlite3.Connection, session_ids: Iterable[str]) -> list[str]:
    """Delete the rows of those of `session_ids` that are closed; returns those that the store has no row of then.

    The caller commits. Raises `sqlite3.Error`.
    """
    if not connection.execute(_IS_STORE).fetchone():
        return list(session_ids)
    gone = []
    for session_id in session_ids:
        if connection.execute(_IS_CLOSED, (session_id,)).fetchone():
            for statement in _DELETE:
                connection.execute(statement, (session_id,))
        if not connection.execute("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)).fetchone():
            gone.append(session_id)
    return gone
