"""The sessions a server holds: found by id and by key, opened, drained and closed.

A session is held from before its opening first waits until it is closed: a drain takes every session there is, and so
misses none that the gate has let through. What a step returns is durable (I9). A close or a drain that the store could
not keep raises `StoreError`, is in force all the same, and may be asked again; an opening that failed leaves the
session that it would have taken over as it was.

Which steps are legal is decided in `sessions.lifecycle`, what a session takes over from another in `sessions.takeover`,
who may open one and when at the gate. A turn is the business of `turns`.
"""

import asyncio
import secrets
import time
from collections.abc import Iterator

from harness.errors import GateClosed, SessionNotFound, StoreError
from harness.sessions.session import Session, SessionConfig
from harness.sessions.takeover import successor_config, turns_to_take_over
from harness.store.base import SessionStore
from harness.telemetry.metrics import ServerMetrics

API_KEY_PREFIX = "sk-harness-"
"""Of the key of every session."""


class SessionRegistry:
    """Live sessions; closed ones are forgotten here and kept by the store."""

    def __init__(self, store: SessionStore, metrics: ServerMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._by_id: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_id.values()))

    def find(self, session_id: str) -> Session | None:
        """The session with that id, None when it is not held."""
        return self._by_id.get(session_id)

    def get(self, session_id: str) -> Session:
        """The session with that id. Raises `SessionNotFound`."""
        session = self._by_id.get(session_id)
        if session is None:
            raise SessionNotFound(f"no session {session_id[:64]!r}: never created, or deleted")
        return session

    def by_key(self, api_key: str) -> Session:
        """The session with that key. Raises `SessionNotFound`."""
        session = self._by_key.get(api_key)
        if session is None:
            raise SessionNotFound("no session has this API key; use the base_url or the api_key of POST /sessions")
        return session

    async def restore(self) -> int:
        """Hold the sessions that a previous server left open (I9); returns how many."""
        sessions = await self._store.load()
        for session in sessions:
            session.doubt_deliveries()
            self._hold(session)
        return len(sessions)

    async def open(self, config: SessionConfig) -> Session:
        """A new session, with the turns of the one that it resumes, which is gone afterwards.

        Raises `StoreError`; `GateClosed` when a drain came meanwhile, but of a session that takes over: that one is
        drained, and may be resumed in its turn; `SessionNotFound` or `MalformedRequest` when there is nothing to take
        over.
        """
        session = await (self._opened(_new(config)) if config.resumes is None else self._successor(config))
        self._metrics.session_created()
        return session

    async def drain(self) -> int:
        """Have no session accept a further turn; returns how many did until now. Raises `StoreError`."""
        sessions = list(self)
        drained = [session for session in sessions if session.drain()]
        # Those drained before as well: the store may have failed at the time.
        await asyncio.gather(*(self._store.set_phase(session) for session in sessions))
        return len(drained)

    async def close(self, session: Session) -> None:
        """End `session` for good. Raises `StoreError`."""
        session.close()
        await self._store.set_phase(session)
        self._forget(session)

    async def _opened(self, session: Session) -> Session:
        self._hold(session)
        try:
            await self._store.create(session)
        except StoreError:
            self._forget(session)
            raise
        if not session.is_open:
            await self.close(session)
            raise GateClosed("the server was drained while the session was created; ask again later")
        return session

    async def _successor(self, config: SessionConfig) -> Session:
        """The new session that takes over from the one that `config` names."""
        previous = self.get(config.resumes or "")
        session = _new(successor_config(previous, config))
        for turn in turns_to_take_over(previous.turns):
            session.restore(turn)
        self._forget(previous)  # at once: only one session may take over from it
        self._hold(session)
        try:
            await self._store.take_over(session, previous)
        except StoreError:
            self._forget(session)
            self._hold(previous)
            raise
        previous.close()
        return session

    def _hold(self, session: Session) -> None:
        self._by_id[session.session_id] = session
        self._by_key[session.api_key] = session
        self._metrics.sessions_open(len(self))

    def _forget(self, session: Session) -> None:
        self._by_id.pop(session.session_id, None)
        self._by_key.pop(session.api_key, None)
        self._metrics.sessions_open(len(self))


def _new(config: SessionConfig) -> Session:
    """A session with an id (32 hex digits) and a key of its own."""
    return Session(secrets.token_hex(16), API_KEY_PREFIX + secrets.token_hex(16), config, time.time())
