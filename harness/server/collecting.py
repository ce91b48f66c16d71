"""Building of records and samples in a thread, one at a time, from a snapshot. They grow with the session."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from time import thread_time
from typing import TypeVar

from harness.machine.log import get_logger
from harness.samples.codec import sample_to_json, samples_to_tensors
from harness.server.telemetry.printable import shorten_secrets
from harness.sessions.record import RecordIds, empty_facts, empty_record, session_facts, session_record
from harness.sessions.session import Session
from harness.types import Json, Sample

TRAILING_TURNS_DROPPED = "trailing_turns_dropped"
"""Warning when samples are collected: turns after one that is not COMPLETED are in no sample (I3)."""

_REST = 4.0  # per second of work
_AFTER_TURNS_S = 1.0  # because short turns are in flight only part of the time
_LONGEST_REST_S = 0.25  # bounds the wait for one giant session, and notices a pause of all turns soon

_T = TypeVar("_T")

log = get_logger(__name__)


class CollectingPlace:
    """The single place where records and samples of a server are built."""

    def __init__(self, count_turns: Callable[[], int]) -> None:
        self._count_turns = count_turns
        self._lock = asyncio.Lock()
        self._rests_until = 0.0
        self._has_turns_until = 0.0

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Reserve the place within the block."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            now = loop.time()
            # A computing thread competes with the event loop for the GIL. So while turns are in flight, or were a
            # second ago, each build waits four times as long as the last one took, which leaves the loop four fifths of
            # the time. An abort has ended its turns, so its collection does not wait.
            if self._count_turns():
                self._has_turns_until = now + _AFTER_TURNS_S
            if now < self._has_turns_until:
                await asyncio.sleep(self._rests_until - now)
            yield

    async def do(self, work: Callable[[], _T]) -> _T:
        """Run `work` off the event loop."""
        loop = asyncio.get_running_loop()

        def measure() -> tuple[_T, float]:
            began = thread_time()
            return work(), thread_time() - began

        result, seconds = await asyncio.to_thread(measure)
        self._rests_until = loop.time() + min(_REST * seconds, _LONGEST_REST_S)
        return result


def collect_tensors(session_id: str, session: Session | None, live_version: int | None) -> bytes:
    """Encode facts, record and samples of one moment; the record has no token columns."""
    if session is None:
        return samples_to_tensors((), {"facts": empty_facts(session_id), "session": empty_record(session_id)})
    about: Json = {"facts": session_facts(session), "session": session_record(session, RecordIds.NONE)}
    return samples_to_tensors(samples_of(session, live_version), about)


def collect_json(session: Session | None, live_version: int | None) -> Json:
    """Return the samples with their columns as lists."""
    samples = () if session is None else samples_of(session, live_version)
    return {"samples": [sample_to_json(sample) for sample in samples]}


def samples_of(session: Session, live_version: int | None) -> Sequence[Sample]:
    """Return the samples under the live policy version, if known. Log the dropped turns (I3)."""
    dropped = sum(len(branch.dropped) for branch in session.plan().delivered)
    if dropped:
        log.warning(TRAILING_TURNS_DROPPED, session_id=shorten_secrets(session.session_id), turns=dropped)
    return session.samples(live_version)
