"""The sessions a server holds: found by id and by key, opened, drained, ended and closed.

A session is held from before its opening first waits until it is closed: a drain takes every session there is, and so
misses none that the gate has let through. The result of a step is durable (I9). A close or a drain that the store could
not keep raises `StoreError`, is in force all the same, and may be asked again; an opening that failed leaves the
session that it would have taken over as it was.

A session that the store cannot read back costs nobody else anything: it is quarantined. Its id and its key answer
`SessionDamaged`, its rows stay as they are until it is deleted, and then it is closed unread.

With an idle time to live, a session that nobody asks for by its id or its key for so long is closed. One with a call
under way, admitted or still at the gate, is in use. After a restart the time begins anew.

Which steps are legal is decided in `sessions.lifecycle`, what a session takes over from another in `sessions.takeover`,
who may open one and when at the gate. A turn is the business of `turns`.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256

import structlog

from harness.errors import GateClosed, MalformedRequest, SessionClosing, SessionDamaged, SessionNotFound, StoreError
from harness.machine.clock import Clock
from harness.server.access import is_same
from harness.server.admitted import AdmittedTurns
from harness.server.connection import HAND_OVER_S
from harness.server.housekeeping import LastUses
from harness.sessions.lifecycle import CloseReason
from harness.sessions.session import Session, SessionConfig
from harness.sessions.takeover import successor_config, turns_to_take_over
from harness.store.base import DamagedSession, SessionStore
from harness.telemetry.metrics import ServerMetrics
from harness.telemetry.secrets import shorten_secrets

API_KEY_PREFIX = "sk-harness-"
"""Of the key of every session."""

_CLOSE_S = 2.0  # whoever deletes has little time; a turn that takes longer ends all the same

END_NOT_KEPT = "session_end_not_kept"
"""Logged when a session was ended and the store could not note that."""

SESSION_QUARANTINED = "session_quarantined"
"""Logged for each session that the store cannot read back."""

SESSIONS_EXPIRED = "sessions_expired"
"""Logged with the sessions that nobody has used for too long."""

_BATCH = 256  # sessions that are closed together: a commit of the store for all of them

log = structlog.get_logger()

_NO_SUCH_KEY = "no session has this API key here; use the base_url and the api_key of the same POST /sessions"


class SessionRegistry:
    """Live sessions; closed ones are forgotten here and kept by the store."""

    def __init__(
        self,
        store: SessionStore,
        metrics: ServerMetrics,
        turns: AdmittedTurns,
        clock: Clock = time.time,
        *,
        drain_grace_s: float,
        idle_ttl_s: float | None = None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._turns = turns
        self._clock = clock
        self._drain_grace_s = drain_grace_s
        self._idle_ttl_s = idle_ttl_s
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[bytes, Session] = {}  # by the digest of the key
        self._quarantined: dict[str, DamagedSession] = {}
        self._uses = LastUses(clock)

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    @property
    def quarantined(self) -> Sequence[DamagedSession]:
        """The sessions that the store could not read back."""
        return list(self._quarantined.values())

    def find(self, session_id: str) -> Session | None:
        """The session with that id, None when it is not held. Raises `SessionDamaged`."""
        if damaged := self._quarantined.get(session_id):
            raise _damage_error(damaged)
        self._uses.use(session_id)
        return self._by_id.get(session_id)

    def get(self, session_id: str) -> Session:
        """The session with that id. Raises `SessionNotFound`, `SessionDamaged`."""
        session = self.find(session_id)
        if session is None:
            unused = "" if self._idle_ttl_s is None else f", or not used for {self._idle_ttl_s:g} s"
            raise SessionNotFound(f"no session {session_id[:64]!r}: never created, or deleted{unused}")
        return session

    def by_key(self, api_key: str) -> Session:
        """The session with that key. Raises `SessionNotFound`, `SessionDamaged`.

        A key is found by its digest and then compared, so that no time says how much of it is right.
        """
        session = self._by_key.get(_digest(api_key))
        if session is not None and is_same(api_key, session.api_key):
            self._uses.use(session.session_id)
            return session
        for damaged in self._quarantined.values():
            if is_same(api_key, damaged.api_key):
                raise _damage_error(damaged)
        raise SessionNotFound(_NO_SUCH_KEY)

    def of_key(self, session_id: str, api_key: str) -> Session:
        """The session with that id and that key.

        Raises `SessionNotFound`, in the same words whether or not there is a session with that id; `SessionDamaged`.
        """
        session = self.by_key(api_key)
        if session.session_id != session_id:
            raise SessionNotFound(_NO_SUCH_KEY)
        return session

    async def restore(self) -> int:
        """Hold the sessions that a previous server left open (I9), quarantine damaged ones; returns how many it holds.

        Raises `StoreError` when the store itself cannot be read.
        """
        sessions, damaged = await self._store.load()
        for session in sessions:
            session.doubt_deliveries()
            self._hold(session)
        for each in damaged:
            self._quarantined[each.session_id] = each
            log.error(SESSION_QUARANTINED, session_id=shorten_secrets(each.session_id), reason=each.reason)
        self._metrics.sessions_quarantined(len(self._quarantined))
        return len(sessions)

    async def open(self, config: SessionConfig, live_version: int | None = None) -> Session:
        """A new session, with the turns of the one that it resumes, which is gone afterwards.

        Turns that are too old for its limits under `live_version`, where that is known, stay behind.

        Raises `StoreError`; `GateClosed` when a drain came meanwhile, but of a session that takes over: that one is
        drained, and may be resumed in its turn; `SessionNotFound` or `MalformedRequest` when there is nothing to take
        over; `MalformedRequest` when another session has its id.
        """
        if config.resumes is not None:
            session = await self._take_over(config, config.resumes, live_version)
        else:
            session = self._new(config)
            self._hold(session)
            try:
                await self._store.create(session)
            except StoreError:
                self._forget(session)
                raise
            if not session.is_open:
                await self.close(session, CloseReason.DRAINED)
                raise GateClosed("the server was drained while the session was created; ask again later")
        self._metrics.session_created()
        return session

    async def drain(self, only: Session | None = None) -> int:
        """Have no session, or `only` one, accept a further turn; returns how many did until now. Raises `StoreError`.

        Turns in flight go on until their engines hand them over, for `drain_grace_s` at most: whoever drains all has
        the engines abort everything next. Nobody will for `only` one, so its requests are ended here, one by one.
        """
        sessions = list(self) if only is None else [only]
        drained = [session for session in sessions if session.drain()]
        hand_over_s = min(HAND_OVER_S, self._drain_grace_s / 2)
        after_s = self._drain_grace_s - hand_over_s if only is None else 0.0
        # A turn that a drain of all has left its grace is ended all the same when its session is drained alone.
        for session in drained if only is None else sessions:
            self._turns.end(session, SessionClosing("drained"), after_s=after_s, hand_over_s=hand_over_s)
        # Those drained before as well: the store may have failed at the time.
        await asyncio.gather(*(self._store.set_phase(session) for session in sessions))
        return len(drained)

    async def end(self, session: Session, *, within_s: float) -> None:
        """Have `session`, whose agent has ended, accept no further turn, and end those in flight in the engine.

        Returns when nothing of it is in flight any more, after `within_s` at the latest. Where the store fails, that is
        in force until a restart: what there is can be collected all the same.
        """
        session.end()
        self._turns.end(session, SessionClosing("the session was ended: its agent is done, its owner collects"))
        try:
            await self._store.set_phase(session)
        except StoreError as error:
            log.warning(END_NOT_KEPT, session_id=shorten_secrets(session.session_id), error=error.message)
        await self._turns.wait_until_ended(session, within_s=within_s)

    def in_use(self, session: Session) -> AbstractContextManager[None]:
        """`session` is not idle in the block, and has just been used after it."""
        return self._uses.in_use(session.session_id)

    async def expire(self) -> int:
        """Close the sessions that nobody has used for the idle time to live; returns how many. Raises `StoreError`."""
        if self._idle_ttl_s is None:
            return 0

        def is_busy(session_id: str) -> bool:
            return bool(self._by_id[session_id].turns_in_flight)  # though nobody may wait for them any more

        expired = 0
        while unused := self._uses.find_unused(self._idle_ttl_s, _BATCH, is_busy):
            batch = [self._by_id[session_id] for session_id in unused]
            for session in batch:  # with no wait in between, nobody can begin to use one
                session.close(CloseReason.IDLE)
            log.info(SESSIONS_EXPIRED, sessions=list(map(shorten_secrets, unused)), idle_s=self._idle_ttl_s)
            await asyncio.gather(*(self.close(session, CloseReason.IDLE) for session in batch))
            self._metrics.sessions_expired(len(batch))
            expired += len(batch)
        return expired

    async def close(self, session: Session, reason: CloseReason = CloseReason.DELETED) -> None:
        """End `session` for good, and its turns in flight as `end` does. Raises `StoreError`."""
        session.close(reason)
        self._turns.end(session, SessionClosing("the session was deleted"))
        await self._turns.wait_until_ended(session, within_s=_CLOSE_S)
        await self._store.set_phase(session)
        self._forget(session)

    async def give_up(self, damaged: DamagedSession) -> None:
        """Close a quarantined session unread: its rows stay, and it is not taken up again. Raises `StoreError`."""
        closed = Session(damaged.session_id, damaged.api_key, SessionConfig(), self._clock())
        closed.close(CloseReason.DAMAGED)
        await self._store.set_phase(closed)
        self._quarantined.pop(damaged.session_id, None)
        self._metrics.sessions_quarantined(len(self._quarantined))

    async def _take_over(self, config: SessionConfig, resumes: str, live_version: int | None) -> Session:
        """The new session that takes over from the one with the id `resumes`."""
        previous = self.get(resumes)
        taken = turns_to_take_over(previous.turns, config.limits, live_version)
        session = self._new(successor_config(previous, config, taken))
        for turn in taken:
            session.restore(turn)
        self._forget(previous)  # at once: only one session may take over from it
        self._hold(session)
        try:
            await self._store.take_over(session, previous)
        except StoreError:
            self._forget(session)
            self._hold(previous)
            raise
        previous.close(CloseReason.TAKEN_OVER)
        return session

    def _new(self, config: SessionConfig) -> Session:
        """A session with a key of its own, and an id (32 hex digits) where its owner has chosen none."""
        session_id = config.session_id or secrets.token_hex(16)
        if session_id in self._by_id or session_id in self._quarantined:
            raise MalformedRequest(f"session_id: there is a session {session_id}; choose another", param="session_id")
        return Session(session_id, API_KEY_PREFIX + secrets.token_hex(16), config, self._clock())

    def _hold(self, session: Session) -> None:
        self._by_id[session.session_id] = session
        self._by_key[_digest(session.api_key)] = session
        self._uses.begin(session.session_id)
        self._metrics.sessions_open(len(self))

    def _forget(self, session: Session) -> None:
        self._by_id.pop(session.session_id, None)
        self._by_key.pop(_digest(session.api_key), None)
        self._uses.end(session.session_id)
        self._metrics.sessions_open(len(self))


def _digest(api_key: str) -> bytes:
    return sha256(api_key.encode()).digest()


def _damage_error(session: DamagedSession) -> SessionDamaged:
    return SessionDamaged(
        f"session {session.session_id} cannot be read back from the store; the other sessions are served. DELETE closes"
        " it, its rows stay for `sqlite3`"
    )
