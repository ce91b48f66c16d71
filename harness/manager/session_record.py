"""What the server knows of a session once its agent has ended.

An agent that was killed may leave a turn in flight: the engine still samples for it, and those tokens belong to the
record too (I4). So the record is read when nothing is in flight any more, or when that takes too long. A session that
cannot be read costs its own rollout and nothing else.
"""

import asyncio
import time
from typing import NamedTuple

import msgspec

from harness.errors import HarnessError
from harness.manager.session_client import SessionClient
from harness.samples.codec import sample_from_json
from harness.types import Json, Sample, TurnStatus

_POLL_S = 0.1


class TurnRecord(msgspec.Struct):
    """What is looked at of a recorded turn."""

    status: TurnStatus


class SessionFacts(msgspec.Struct):
    """What is looked at of a recorded session."""

    phase: str = ""
    turns: list[TurnRecord] = msgspec.field(default_factory=list)
    refusals: dict[str, int] = msgspec.field(default_factory=dict)
    turns_in_flight: int = 0


class SessionRecord(NamedTuple):
    """A session as recorded."""

    session: Json
    facts: SessionFacts
    samples: tuple[Sample, ...] = ()
    lost: str | None = None
    """Why it could not be read, or not completely."""


async def read_record(client: SessionClient, session_id: str, *, settle_s: float) -> SessionRecord:
    """The record of a session whose agent has ended, read at most `settle_s` later than the client needs."""
    session = empty_session({})
    try:
        session = await _settled(client, session_id, settle_s)
        facts = msgspec.convert(session, SessionFacts)
        samples = await client.samples(session_id)
        return SessionRecord(session, facts, tuple(sample_from_json(sample) for sample in samples))
    except (HarnessError, msgspec.ValidationError) as error:
        return SessionRecord(session, SessionFacts(), lost=str(error))


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


async def _settled(client: SessionClient, session_id: str, settle_s: float) -> Json:
    deadline = time.monotonic() + settle_s
    session = await client.read(session_id)
    while session.get("turns_in_flight") and time.monotonic() < deadline:
        await asyncio.sleep(_POLL_S)
        session = await client.read(session_id)
    return session
