"""The open sessions of a server, in memory or evicted, by id and by key.

An evicted session leaves a stub (`sessions.paging`), and the next caller waits while the store loads it. Eviction
writes nothing, so a crash loses nothing.

Each session has one object, ever: if a caller still holds an evicted session (a client may take minutes to send its
body), that object returns instead of a copy.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from hashlib import sha256
from time import perf_counter
from weakref import WeakValueDictionary

from harness.credentials import is_same
from harness.errors import StoreError
from harness.machine.clock import Clock
from harness.machine.log import get_logger
from harness.server.housekeeping import LastUses
from harness.server.store.base import SessionStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.printable import shorten_secrets
from harness.sessions.paging import SessionStub, bring_back, find_unnoted, page_out, stub_of
from harness.sessions.session import IsComparable, Session

PAGE_OUT_FAILED = "page_out_failed"
"""Logged if a session cannot be compared with its rows and stays in memory."""

_BATCH = 256  # sessions per round
_READ_S = 60.0  # as long as a turn waits for the store

log = get_logger(__name__)


class HeldSessions:
    """Table of open sessions, evicted when idle for `page_out_s`. `is_comparable`: the engine can score the turn."""

    def __init__(
        self,
        store: SessionStore,
        metrics: ServerMetrics,
        clock: Clock,
        is_comparable: IsComparable,
        page_out_s: float | None,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._is_comparable = is_comparable
        self._page_out_s = page_out_s
        self._in_memory: dict[str, Session] = {}
        self._stubs: dict[str, SessionStub] = {}
        self._let_go: WeakValueDictionary[str, Session] = WeakValueDictionary()
        """Evicted sessions that a caller still holds."""
        self._by_key: dict[bytes, str] = {}
        self._readings: dict[str, asyncio.Event] = {}
        self._uses = LastUses(clock)
        self._tries = LastUses(clock)
        """Last use, or last failed eviction, of sessions in memory."""
        self._rests = LastUses(clock)

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._stubs)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._in_memory or session_id in self._stubs

    def __iter__(self) -> Iterator[Session | SessionStub]:
        for session in list(self._let_go.values()):
            self._return(session)
        return iter([*self._in_memory.values(), *self._stubs.values()])

    def look(self, session_id: str) -> Session | SessionStub | None:
        """Return the session or stub, or None."""
        if (session := self._let_go.get(session_id)) is not None:
            self._return(session)
        return self._in_memory.get(session_id) or self._stubs.get(session_id)

    def in_memory(self, session_id: str) -> Session | None:
        """Return the session unless it is evicted."""
        return self._in_memory.get(session_id)

    async def find(self, session_id: str) -> Session | None:
        """Return the session, loaded if evicted, or None. Counts as a use.

        No `await` separates the load from the caller's next step. Raises `StoreError`.
        """
        session = self._in_memory.get(session_id)
        if session is None and session_id in self._stubs:
            session = await self._read_back(session_id)
        self._use(session_id)
        return session

    async def find_by_key(self, api_key: str) -> Session | None:
        """Return the session with that key, as `find`."""
        # Looked up by digest and then compared, so that timing does not reveal how much of the key is right.
        session_id = self._by_key.get(_digest(api_key))
        session = None if session_id is None else await self.find(session_id)
        return session if session is not None and is_same(api_key, session.api_key) else None

    def hold(self, session: Session) -> None:
        """Hold `session`, as used now."""
        self._in_memory[session.session_id] = session
        self._by_key[_digest(session.api_key)] = session.session_id
        self._uses.begin(session.session_id)
        self._tries.begin(session.session_id)
        self._tell()

    def take(self, session: Session) -> Session | SessionStub:
        """Return a session of an earlier server, as a stub if eviction is on. Called in another thread."""
        doubtful = session.doubt_deliveries()
        if self._page_out_s is None:
            return session
        stub = stub_of(session, _digest(session.api_key), self._is_comparable)
        return replace(stub, deliveries=dict.fromkeys(doubtful, False))

    def hold_left(self, held: Session | SessionStub) -> None:
        """Hold a result of `take`."""
        if isinstance(held, Session):
            self.hold(held)
            return
        self._stubs[held.session_id] = held
        self._by_key[held.key_digest] = held.session_id
        self._rests.begin(held.session_id)
        self._tell()

    def forget(self, held: Session | SessionStub) -> None:
        session_id = held.session_id
        self._in_memory.pop(session_id, None)
        self._stubs.pop(session_id, None)
        self._let_go.pop(session_id, None)
        self._by_key.pop(held.key_digest if isinstance(held, SessionStub) else _digest(held.api_key), None)
        self._uses.end(session_id)
        self._tries.end(session_id)
        self._rests.end(session_id)
        self._tell()

    def change(self, stub: SessionStub) -> bool:
        """Replace the stub with the same id. Return True if it differs."""
        before, self._stubs[stub.session_id] = self._stubs[stub.session_id], stub
        return before is not stub

    def has_call(self, session_id: str) -> bool:
        """Return True if a call is in progress, admitted or not."""
        return self._uses.is_in_use(session_id)

    @contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """Keep `session` in use within the block."""
        session_id = session.session_id
        if self._let_go.get(session_id) is session:
            self._return(session)
        with self._uses.kept(session_id):
            try:
                yield
            finally:
                self._use(session_id)

    @asynccontextmanager
    async def borrow(self, session_id: str) -> AsyncIterator[Session | None]:
        """Yield the session, or None, and evict it again unless it was used meanwhile. Raises `StoreError`."""
        was_paged_out = isinstance(self.look(session_id), SessionStub)
        session = await self._read_back(session_id) if was_paged_out else self._in_memory.get(session_id)
        last_use = self._uses.last_use(session_id)
        with self._uses.kept(session_id):
            yield session
        if was_paged_out and session is not None and self._uses.last_use(session_id) == last_use:
            await self._page_out(session)

    def find_unused(self, seconds: float) -> list[Session | SessionStub]:
        """Return some of the sessions unused for `seconds`."""
        resting_s = max(0.0, seconds - (self._page_out_s or 0.0))
        unused = [
            *self._rests.find_unused(resting_s, _BATCH, self._is_busy),
            *self._uses.find_unused(seconds, _BATCH, self._is_busy),
        ]
        return [held for session_id in unused if (held := self.look(session_id)) is not None]

    async def page_out_idle(self) -> int:
        """Evict some idle sessions. Return how many. A failed eviction is retried after another idle period."""
        if self._page_out_s is None:
            return 0
        paged_out = 0
        for session_id in self._tries.find_unused(self._page_out_s, _BATCH, self._is_in_use):
            session = self._in_memory.get(session_id)
            try:
                if session is not None and await self._page_out(session):
                    paged_out += 1
                    continue
            except StoreError as error:
                log.warning(PAGE_OUT_FAILED, session_id=shorten_secrets(session_id), error=error.message)
            self._tries.use(session_id)
        return paged_out

    async def _page_out(self, session: Session) -> bool:
        session_id = session.session_id
        kept = await self._store.outline(session_id)
        if self._uses.is_in_use(session_id) or self._in_memory.get(session_id) is not session:
            return False
        stub = page_out(session, kept, _digest(session.api_key), self._is_comparable)
        if stub is None:
            for turn in find_unnoted(session, kept):  # so that the next try may evict it
                self._store.mark_delivered(session_id, turn.turn, delivered=turn.delivered)
            return False
        del self._in_memory[session_id]
        self._stubs[session_id], self._let_go[session_id] = stub, session
        self._uses.end(session_id)
        self._tries.end(session_id)
        self._rests.begin(session_id)
        self._tell()
        return True

    async def _read_back(self, session_id: str) -> Session | None:
        while session_id in self._stubs:
            if (session := self._let_go.get(session_id)) is not None:
                self._return(session)
            elif (reading := self._readings.get(session_id)) is not None:
                await reading.wait()
            else:
                self._readings[session_id] = reading = asyncio.Event()
                began = perf_counter()
                try:
                    async with asyncio.timeout(_READ_S):
                        session = await self._store.read(session_id)
                except TimeoutError:
                    raise StoreError(f"the store did not read session {session_id} back within {_READ_S:g} s") from None
                finally:  # the reading task may be cancelled or fail: then a waiting task tries
                    del self._readings[session_id]
                    reading.set()
                stub = self._stubs.get(session_id)  # the current one: it may have been drained or closed meanwhile
                if stub is not None:
                    bring_back(stub, session)
                    self._return(session)
                    self._metrics.read_back.observe(perf_counter() - began)
        return self._in_memory.get(session_id)

    def _return(self, session: Session) -> None:
        session_id = session.session_id
        del self._stubs[session_id]
        self._let_go.pop(session_id, None)
        self._rests.end(session_id)
        self.hold(session)

    def _use(self, session_id: str) -> None:
        self._uses.use(session_id)
        self._tries.use(session_id)

    def _is_in_use(self, session_id: str) -> bool:
        return self._uses.is_in_use(session_id) or self._is_busy(session_id)

    def _is_busy(self, session_id: str) -> bool:
        session = self.look(session_id)
        return session is not None and bool(session.turns_in_flight)  # even if no client waits for them

    def _tell(self) -> None:
        self._metrics.sessions_open.set(len(self))
        self._metrics.sessions_paged_out.set(len(self._stubs))


def _digest(api_key: str) -> bytes:
    return sha256(api_key.encode()).digest()
