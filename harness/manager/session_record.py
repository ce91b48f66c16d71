"""What the server knows of a session once its agent has ended.

An agent that was killed may leave a turn in flight: the engine still samples for it, and those tokens belong to the
record too (I4). So everything is collected, in one request, when nothing is in flight any more, or when that takes too
long. A session that cannot be read costs its own rollout and nothing else.
"""

import asyncio
import time
from typing import NamedTuple

from harness.errors import HarnessError
from harness.manager.session_client import SessionClient, SessionFacts
from harness.types import Json, Sample

_POLL_S = 0.1


class SessionRecord(NamedTuple):
    """A session as recorded."""

    session: Json
    facts: SessionFacts
    samples: tuple[Sample, ...] = ()
    lost: str | None = None
    """Why it could not be read."""


async def read_record(client: SessionClient, session_id: str, *, settle_s: float) -> SessionRecord:
    """The record of a session whose agent has ended, read at most `settle_s` later than the client needs."""
    try:
        await _settled(client, session_id, settle_s)
        facts, session, samples = await client.collect(session_id)
    except HarnessError as error:
        return SessionRecord(empty_session({}), SessionFacts(phase=""), lost=str(error))
    return SessionRecord(session, facts, samples)


def empty_session(metadata: Json) -> Json:
    """The record of a session that the server does not have."""
    return {
        "session_id": None,
        "phase": None,
        "metadata": metadata,
        "turns": [],
        "turns_in_flight": 0,
        "refusals": {},
        "ledger": {"generated": 0, "trained": 0, "masked": 0, "dropped": {}},
    }


async def _settled(client: SessionClient, session_id: str, settle_s: float) -> None:
    """Return when nothing is in flight any more, or `settle_s` are over."""
    deadline = time.monotonic() + settle_s
    facts = await client.facts(session_id)
    while facts.turns_in_flight and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        facts = await client.facts(session_id)
