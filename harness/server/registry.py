"""The sessions of a server: found by id or key, opened, drained, ended and closed.

The registry holds a session from before its opening first awaits until it is closed, so a drain misses none that passed
the gate. Results are durable (I9). A close or drain that the store could not keep raises `StoreError`, but takes effect
and may be repeated. A failed opening leaves the predecessor unchanged.

An unloadable session is quarantined: its id and key get `SessionDamaged`, and its rows stay.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence

from harness.credentials import is_same
from harness.errors import GateClosed, MalformedRequest, SessionClosing, SessionDamaged, SessionNotFound, StoreError
from harness.machine.clock import Clock, steady
from harness.machine.log import get_logger
from harness.server.admitted import AdmittedTurns
from harness.server.held_sessions import HeldSessions
from harness.server.http.connection import HAND_OVER_S
from harness.server.store.base import DamagedSession, SessionStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.printable import shorten_secrets
from harness.server.telemetry.tracing.tracer import SessionTracer
from harness.sessions.inheritance import heir_config, require_one_heir, turns_to_inherit
from harness.sessions.lifecycle import CloseReason, RolloutEnd
from harness.sessions.paging import SessionStub
from harness.sessions.session import IsComparable, Session
from harness.sessions.session_config import Inheritance, SessionConfig
from harness.sessions.shard_ids import ShardPlace
from harness.sessions.takeover import successor_config, turns_to_take_over

API_KEY_PREFIX = "sk-harness-"
"""Prefix of every session API key."""

_CLOSE_S = 2.0  # because deleting clients wait briefly; a slower turn ends anyway

END_NOT_KEPT = "session_end_not_kept"
"""Logged when the store could not note a session's end."""

SESSION_QUARANTINED = "session_quarantined"
"""Logged for each session that cannot be loaded."""

SESSIONS_EXPIRED = "sessions_expired"
"""Logged with the ids of expired sessions."""

log = get_logger(__name__)

_NO_SUCH_KEY = "no session on this server has this API key; use the base_url and the api_key of the same POST /sessions"


class SessionRegistry:
    """Open sessions. Closed ones remain only in the store."""

    def __init__(
        self,
        store: SessionStore,
        metrics: ServerMetrics,
        turns: AdmittedTurns,
        clock: Clock = time.time,
        *,
        idle_clock: Clock | None = None,
        drain_grace_s: float,
        is_comparable: IsComparable = lambda _: True,
        idle_ttl_s: float | None = None,
        idle_page_out_s: float | None = None,
        shard: ShardPlace | None = None,
        tracer: SessionTracer | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._turns = turns
        self._clock = clock
        self._drain_grace_s = drain_grace_s
        self._idle_ttl_s = idle_ttl_s
        self._held = HeldSessions(store, metrics, idle_clock or steady(clock), is_comparable, idle_page_out_s)
        self._shard = shard
        self._tracer = tracer
        self._quarantined: dict[str, DamagedSession] = {}
        self.in_use = self._held.in_use
        self.has_call = self._held.has_call
        self.in_memory = self._held.in_memory
        self.look = self._held.look
        self.borrow = self._held.borrow
        self.page_out_idle = self._held.page_out_idle

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Session | SessionStub]:
        return iter(self._held)

    @property
    def quarantined(self) -> Sequence[DamagedSession]:
        """Sessions that could not be loaded."""
        return list(self._quarantined.values())

    async def find(self, session_id: str) -> Session | None:
        """Return the session, or None. Raises `SessionDamaged`, `StoreError`."""
        if damaged := self._quarantined.get(session_id):
            raise _damage_error(damaged)
        return await self._held.find(session_id)

    async def get(self, session_id: str) -> Session:
        """Return the session. Raises `SessionNotFound`, `SessionDamaged`, `StoreError`."""
        session = await self.find(session_id)
        if session is None:
            unused = "" if self._idle_ttl_s is None else f", or not used for {self._idle_ttl_s:g} s"
            raise SessionNotFound(f"no session {session_id[:64]!r}: never created, or deleted{unused}")
        return session

    async def by_key(self, api_key: str) -> Session:
        """Return the session with that key. Raises as `get`."""
        session = await self._held.find_by_key(api_key)
        if session is not None:
            return session
        for damaged in self._quarantined.values():
            if is_same(api_key, damaged.api_key):
                raise _damage_error(damaged)
        raise SessionNotFound(_NO_SUCH_KEY)

    async def of_key(self, session_id: str, api_key: str) -> Session:
        """Return the session with that id and key. Raises as `get`, without revealing whether the id exists."""
        session = await self.by_key(api_key)
        if session.session_id != session_id:
            raise SessionNotFound(_NO_SUCH_KEY)
        return session

    async def restore(self) -> int:
        """Load the sessions that a previous server left open (I9). Return how many. Raises `StoreError`."""
        sessions, damaged = await self._store.load(self._held.take)
        for held in sessions:
            self._held.hold_left(held)
        for each in damaged:
            self._quarantined[each.session_id] = each
            log.error(SESSION_QUARANTINED, session_id=shorten_secrets(each.session_id), reason=each.reason)
        self._metrics.sessions_quarantined.set(len(self._quarantined))
        return len(sessions)

    async def find_record(self, inherits: Inheritance) -> Session:
        """Return the earlier session of an heir. Raises `SessionDamaged`, or `MalformedRequest` if taken over."""
        heir = await self._store.find_heir(inherits.session_id)
        require_one_heir((each for each in self if isinstance(each, Session)), heir, inherits)
        held = await self.find(inherits.session_id)
        if held is not None:
            return held
        try:
            record = await self._store.read_record(inherits.session_id)
        except StoreError as error:
            raise MalformedRequest(
                f"inherits.session_id: expected a session in the store of this server: {error.message}",
                param="inherits.session_id",
            ) from error
        if record.tokenizer.digest not in (None, self._store.tokenizer.digest):
            raise MalformedRequest(
                f"inherits.session_id: expected a record of this server's tokenizer, {self._store.tokenizer.name},"
                f" that one has the tokens of {record.tokenizer.name}",
                param="inherits.session_id",
            )
        return record.session

    async def open(
        self, config: SessionConfig, live_version: int | None = None, previous: Session | None = None
    ) -> Session:
        """Open a session, which takes over the turns of `config.resumes`, or inherits the turns of `previous`, if set.

        Turns too old for its limits under `live_version` stay behind.

        Raises `StoreError`; `GateClosed` if a drain came meanwhile, except for a takeover, which is drained and may be
        resumed; `SessionNotFound` or `MalformedRequest` if the takeover or the id is impossible.
        """
        if config.resumes is not None:
            session = await self._take_over(config, config.resumes, live_version)
        else:
            session = self._new(config) if previous is None else self._new_heir(config, previous, live_version)
            self._held.hold(session)
            try:
                await self._store.create(session)
            except StoreError:
                self._held.forget(session)
                raise
            if not session.is_open:
                await self.close(session, CloseReason.DRAINED)
                raise GateClosed("the server was drained while the session was created; retry later")
        self._metrics.sessions_created.inc()
        return session

    async def drain(self, only: Session | None = None) -> int:
        """Drain all sessions, after `drain_grace_s`, or one at once. Return how many were open. Raises `StoreError`."""
        held = list(self) if only is None else [only]
        sessions = [each for each in held if isinstance(each, Session)]
        stubs = [each.drain() for each in held if isinstance(each, SessionStub)]
        drained = [session for session in sessions if session.drain()]
        drained_stubs = [stub for stub in stubs if self._held.change(stub)]
        # After a drain of all, the caller has the engines abort. For one session, its requests are ended here.
        hand_over_s = min(HAND_OVER_S, self._drain_grace_s / 2)
        after_s = self._drain_grace_s - hand_over_s if only is None else 0.0
        # A single drain also ends turns that a drain of all left their grace.
        for session in drained if only is None else sessions:
            self._turns.end(session, SessionClosing("drained"), after_s=after_s, hand_over_s=hand_over_s)
        # Earlier drained sessions too, because the store may have failed then.
        await asyncio.gather(*map(self._store.set_phase, sessions), *map(self._store.set_phase, stubs))
        return len(drained) + len(drained_stubs)

    async def end(self, session: Session, *, within_s: float) -> None:
        """Close `session`, and end its turns in the engine, within `within_s`. Without the store, until a restart."""
        session.end()
        self._turns.end(session, SessionClosing("the session was ended by its owner"))
        try:
            await self._store.set_phase(session)
        except StoreError as error:
            log.warning(END_NOT_KEPT, session_id=shorten_secrets(session.session_id), error=error.message)
        await self._turns.wait_until_ended(session, within_s=within_s)

    def mark_delivered(self, session_id: str, index: int, delivered: bool) -> None:
        """Note whether an answer was handed over completely; retries depend on it (I5).

        Takes an id: a connection reports this as late as its next request, and must not keep a session in memory.
        """
        held = self._held.look(session_id)
        if isinstance(held, Session):
            held.mark_delivered(index, delivered=delivered)
        elif held is not None:
            self._held.change(held.mark_delivered(index, delivered=delivered))
        self._store.mark_delivered(session_id, index, delivered=delivered)

    async def expire(self) -> int:
        """Close expired sessions. Return how many. Raises `StoreError`."""
        if self._idle_ttl_s is None:
            return 0
        expired = 0
        while unused := self._held.find_unused(self._idle_ttl_s):
            # No `await` in between, so no call can start to use one.
            closed = [self._close_to_all(each, CloseReason.IDLE) for each in unused]
            ids = [shorten_secrets(each.session_id) for each in closed]
            log.info(SESSIONS_EXPIRED, sessions=ids, idle_s=self._idle_ttl_s)
            await asyncio.gather(*map(self._forget_closed, closed))
            self._metrics.sessions_expired.inc(len(unused))
            expired += len(unused)
        return expired

    async def close(
        self, held: Session | SessionStub, reason: CloseReason = CloseReason.DELETED, end: RolloutEnd | None = None
    ) -> None:
        """Close a session, and end its turns in flight. Raises `StoreError`."""
        if end is not None:
            self._store.mark_end(held.session_id, end)
        await self._forget_closed(self._close_to_all(held, reason))

    def _close_to_all(self, held: Session | SessionStub, reason: CloseReason) -> Session | SessionStub:
        if isinstance(held, SessionStub):
            held = held.close(reason)
            self._held.change(held)
        else:
            held.close(reason)
            self._turns.end(held, SessionClosing("the session was deleted"))
        return held

    async def _forget_closed(self, held: Session | SessionStub) -> None:
        if isinstance(held, Session):
            await self._turns.wait_until_ended(held, within_s=_CLOSE_S)
        await self._store.set_phase(held)
        self._held.forget(held)
        if self._tracer is not None:
            self._tracer.tell_session(held)

    async def give_up(self, damaged: DamagedSession) -> None:
        """Close a quarantined session unread; its rows stay. Raises `StoreError`."""
        closed = Session(damaged.session_id, damaged.api_key, SessionConfig(), self._clock())
        closed.close(CloseReason.DAMAGED)
        await self._store.set_phase(closed)
        self._quarantined.pop(damaged.session_id, None)
        self._metrics.sessions_quarantined.set(len(self._quarantined))

    async def _take_over(self, config: SessionConfig, resumes: str, live_version: int | None) -> Session:
        previous = await self.get(resumes)
        taken = turns_to_take_over(previous.turns, config.limits, live_version)
        session = self._new(successor_config(previous, config, taken))
        for turn in taken:
            session.restore(turn)
        self._held.forget(previous)  # at once, because only one session may take over
        self._held.hold(session)
        try:
            await self._store.take_over(session, previous)
        except StoreError:
            self._held.forget(session)
            self._held.hold(previous)
            raise
        previous.close(CloseReason.TAKEN_OVER)
        if self._tracer is not None:
            self._tracer.tell_takeover(previous, session)
        return session

    def _new_heir(self, config: SessionConfig, previous: Session, live_version: int | None) -> Session:
        inherits = config.inherits
        assert inherits is not None, "only an heir has a predecessor"
        # Again: another heir may have come since `find_record`.
        require_one_heir((each for each in self if isinstance(each, Session)), None, inherits)
        session = self._new(heir_config(previous, config, inherits))
        for turn in turns_to_inherit(previous, inherits, config.limits, live_version):
            session.restore(turn)
        return session

    def _new(self, config: SessionConfig) -> Session:
        session_id = config.session_id or self._new_digits()
        if self._shard is not None and not self._shard.has(session_id):
            raise MalformedRequest(
                f"session_id: expected one of shard {self._shard.number} of {self._shard.shards}, which its first byte"
                " names; create sessions at the front",
                param="session_id",
            )
        if session_id in self._held or session_id in self._quarantined:
            raise MalformedRequest(f"session_id: session {session_id} exists; choose another", param="session_id")
        return Session(session_id, API_KEY_PREFIX + self._new_digits(), config, self._clock())

    def _new_digits(self) -> str:
        digits = secrets.token_hex(16)
        return digits if self._shard is None else self._shard.mark(digits)


def _damage_error(session: DamagedSession) -> SessionDamaged:
    return SessionDamaged(
        f"session {session.session_id} cannot be read back from the store; other sessions are not affected."
        " DELETE closes it; its rows stay in the store"
    )
