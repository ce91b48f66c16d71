"""Records and samples of sessions, put together beside the running ones.

They are as long as the session, and are made in another thread from a snapshot. Threads that compute take turns with
the event loop, which waits behind them at each of its steps. So one session is put together at one time, however many
are asked for; and while turns are in flight, or were a second ago, the next one waits four times as long as the last
one took, which leaves the loop four fifths of the time. Nothing waits when there are no turns: an abort, which has
ended them, collects as fast as it can.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import thread_time
from typing import TypeVar

from harness.machine.log import get_logger
from harness.samples.codec import sample_to_json, samples_to_tensors
from harness.sessions.record import RecordIds, empty_facts, empty_record, session_facts, session_record
from harness.sessions.session import Session
from harness.telemetry.secrets import shorten_secrets
from harness.types import Json, Sample

TRAILING_TURNS_DROPPED = "trailing_turns_dropped"
"""Warned of when samples are collected: turns after one that is not COMPLETED are in none (I3)."""

_REST = 4.0  # for each second of work
_AFTER_TURNS_S = 1.0  # short turns are in flight only now and then
_LONGEST_REST_S = 0.25  # a giant session holds nobody up for long, and a pause of all turns is soon noticed

_T = TypeVar("_T")

log = get_logger(__name__)


class CollectingPlace:
    """The one place at which records and samples of a server's sessions are put together.

    Args:
        count_turns: How many turns are in flight.
    """

    def __init__(self, count_turns: Callable[[], int]) -> None:
        self._count_turns = count_turns
        self._lock = asyncio.Lock()  # of one thread that computes beside the event loop
        self._rests_until = 0.0
        self._has_turns_until = 0.0

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """The place is one's own in the block, which takes a snapshot and has it worked on."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            now = loop.time()
            if self._count_turns():
                self._has_turns_until = now + _AFTER_TURNS_S
            if now < self._has_turns_until:
                await asyncio.sleep(self._rests_until - now)
            yield

    async def do(self, work: Callable[[], _T]) -> _T:
        """Do `work` off the event loop, in the block."""
        loop = asyncio.get_running_loop()

        def measure() -> tuple[_T, float]:
            began = thread_time()
            return work(), thread_time() - began

        result, seconds = await asyncio.to_thread(measure)
        self._rests_until = loop.time() + min(_REST * seconds, _LONGEST_REST_S)
        return result


def collect_tensors(session_id: str, session: Session | None, live_version: int | None) -> bytes:
    """Facts, record and samples of one moment as one blob; the record has no token columns."""
    if session is None:
        return samples_to_tensors((), {"facts": empty_facts(session_id), "session": empty_record(session_id)})
    about: Json = {"facts": session_facts(session), "session": session_record(session, RecordIds.NONE)}
    return samples_to_tensors(samples_of(session, live_version), about)


def collect_json(session: Session | None, live_version: int | None) -> Json:
    """The samples with their columns as lists."""
    samples = () if session is None else samples_of(session, live_version)
    return {"samples": [sample_to_json(sample) for sample in samples]}


def samples_of(session: Session, live_version: int | None) -> Sequence[Sample]:
    """The samples under the live policy version where that is known; what they leave out is in the log (I3)."""
    dropped = sum(len(branch.dropped) for branch in session.plan().delivered)
    if dropped:
        log.warning(TRAILING_TURNS_DROPPED, session_id=shorten_secrets(session.session_id), turns=dropped)
    return session.samples(live_version)
