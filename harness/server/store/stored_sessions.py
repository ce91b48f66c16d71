"""Token counts of stored sessions, and deletion of closed ones, for the books of a run.

The run's tables are in the same database, so one connection updates both in one transaction. The claim on the store is
not needed: no server writes rows of closed sessions.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.server.store.rows import DELETE_SESSION, OWN_TURN, SAMPLED
from harness.sessions.ledger import Unknown
from harness.sessions.lifecycle import CloseReason, Phase


class StoredSession(NamedTuple):
    session_id: str
    closed_at: float | None
    """Seconds since the epoch; None if not closed."""
    is_taken_over: bool
    """True if a successor accounts for its tokens."""
    generated: int
    """Sampled tokens, including discarded ones and those that a predecessor left behind."""
    unknown: Unknown


_COUNT = f"""
SELECT session_id, phase, closed_at, closed_because,
       {SAMPLED} + COALESCE(json_extract(config, '$.left_behind'), 0) AS generated,
       COALESCE(SUM(json_array_length(turns.unknown)) FILTER (WHERE {OWN_TURN}), 0)
           + COALESCE(json_extract(config, '$.unknown_left_behind.requests'), 0) AS requests,
       COALESCE(SUM((SELECT COALESCE(SUM(json_extract(value, '$.at_most')), 0) FROM json_each(turns.unknown)))
           FILTER (WHERE {OWN_TURN}), 0)
           + COALESCE(json_extract(config, '$.unknown_left_behind.tokens'), 0) AS tokens
FROM sessions LEFT JOIN turns USING (session_id)
WHERE session_id IN (
    SELECT session_id FROM sessions WHERE phase != 'closed'
    UNION ALL SELECT session_id FROM sessions WHERE phase = 'closed' AND closed_at >= ?
)
GROUP BY session_id
"""  # noqa: S608  # ours
_IS_STORE = "SELECT 1 FROM sqlite_master WHERE name = 'turns'"
_TAKEN_OVER = """
SELECT session_id FROM sessions WHERE phase = 'closed' AND closed_because = 'taken_over' AND closed_at < ?
"""
_IS_CLOSED = "SELECT 1 FROM sessions WHERE session_id = ? AND phase = 'closed'"


def count_sessions(connection: sqlite3.Connection, closed_since: float = 0.0) -> Iterator[StoredSession]:
    """Yield the sessions that are open, or closed at `closed_since` or later. Raises `sqlite3.Error`."""
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
    """Return the sessions that successors took over before `before`. Raises `sqlite3.Error`."""
    if not connection.execute(_IS_STORE).fetchone():
        return []
    return [session_id for (session_id,) in connection.execute(_TAKEN_OVER, (before,))]


def forget_sessions(connection: sqlite3.Connection, session_ids: Iterable[str]) -> list[str]:
    """Delete closed sessions among these. Return ids without a row. The caller commits. Raises `sqlite3.Error`."""
    if not connection.execute(_IS_STORE).fetchone():
        return list(session_ids)
    gone = []
    for session_id in session_ids:
        if connection.execute(_IS_CLOSED, (session_id,)).fetchone():
            for statement in DELETE_SESSION:
                connection.execute(statement, (session_id,))
        if not connection.execute("SELECT 1 FROM sessions WHERE session_id = ?", (session_id,)).fetchone():
            gone.append(session_id)
    return gone
