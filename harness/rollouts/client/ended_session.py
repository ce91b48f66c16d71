"""A session's record, read after its agent and the session ended: calls in flight belong to it (I4)."""

from typing import NamedTuple

from harness.errors import HarnessError
from harness.rollouts.client.session_server import SessionFacts, SessionServerClient
from harness.sessions.record import empty_record
from harness.types import Json, Sample


class SessionRecord(NamedTuple):
    session: Json
    facts: SessionFacts
    samples: tuple[Sample, ...] = ()
    lost: str | None = None
    """Reason for no record."""


async def read_record(client: SessionServerClient, session_id: str, *, end_s: float) -> SessionRecord:
    """End a session and read its record."""
    try:
        await client.end(session_id, within_s=end_s)
        facts, session, samples = await client.collect(session_id)
    except HarnessError as error:
        return SessionRecord(empty_record(None, None), SessionFacts(phase=""), lost=str(error))
    return SessionRecord(session, facts, samples)
