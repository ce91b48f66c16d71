"""The server's record of a session whose agent has ended.

An agent may leave model calls in flight: its own, when it was killed, or those of a process that outlives it. Tokens
that are sampled for them belong to the record too (I4). So collecting begins by ending the session: it accepts no
further turn and its requests end in the engines. Everything is then read in one request. A session that cannot be read
costs its own rollout and nothing else.
"""

from typing import NamedTuple

from harness.client.session_server import SessionFacts, SessionServerClient
from harness.errors import HarnessError
from harness.sessions.record import empty_record
from harness.types import Json, Sample


class SessionRecord(NamedTuple):
    """A session as recorded."""

    session: Json
    facts: SessionFacts
    samples: tuple[Sample, ...] = ()
    lost: str | None = None
    """Why it could not be read."""


async def read_record(client: SessionServerClient, session_id: str, *, end_s: float) -> SessionRecord:
    """The record of a session whose agent has ended, read at most `end_s` later than the client needs."""
    try:
        await client.end(session_id, within_s=end_s)
        facts, session, samples = await client.collect(session_id)
    except HarnessError as error:
        return SessionRecord(empty_record(None, None), SessionFacts(phase=""), lost=str(error))
    return SessionRecord(session, facts, samples)
