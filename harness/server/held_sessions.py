"""The sessions that a server holds, in memory or paged out: found by id and by key.

With a time for it, a session that nobody uses for so long is paged out: memory keeps a stub (`sessions.paging`), and
whoever asks for it next waits until it has been read back. One with a call under way, admitted or still at the gate, is
in use. What can not be read back is a `StoreError` for whoever asks, and costs nobody else anything.

There is one object for a session, ever: a session that was let go while somebody still had it (a client that takes
minutes to send its body) is that object again, and not another one from the store. Nothing is written when a session is
paged out, so a server that is killed then has lost nothing.
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
from harness.sessions.paging import SessionStub, bring_back, find_unnoted, page_out, stub_of
from harness.sessions.session import IsComparable, Session
from harness.store.base import SessionStore
from harness.telemetry.metrics import ServerMetrics
from harness.telemetry.secrets import shorten_secrets

PAGE_OUT_FAILED = "page_out_failed"
"""Logged for a session whose rows cannot be compared with memory, which keeps it."""

_BATCH = 256  # sessions that are looked at in one go
_READ_S = 60.0  # as long as a turn waits for the store

log = get_logger(__name__)


class HeldSessions:
    """A table of sessions; see the module's text.

    Args:
        store: Has whatever is paged out.
        is_comparable: Which turns the engine can score.
        page_out_s: None keeps every session in memory.
    """

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
        """Sessions that are paged out, and that somebody still has."""
        self._by_key: dict[bytes, str] = {}
        self._readings: dict[str, asyncio.Event] = {}
        self._uses = LastUses(clock)
        self._tries = LastUses(clock)
        """When each session in memory was used last, or could not be paged out."""
        self._rests = LastUses(clock)
        """When each stub was paged out."""

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._stubs)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._in_memory or session_id in self._stubs

    def __iter__(self) -> Iterator[Session | SessionStub]:
        for session in list(self._let_go.values()):
            self._return(session)
        return iter([*self._in_memory.values(), *self._stubs.values()])

    def look(self, session_id: str) -> Session | SessionStub | None:
        """What is held under that id, as it is; None when there is nothing."""
        if (session := self._let_go.get(session_id)) is not None:
            self._return(session)
        return self._in_memory.get(session_id) or self._stubs.get(session_id)

    def in_memory(self, session_id: str) -> Session | None:
        """The session with that id, when it is not paged out."""
        return self._in_memory.get(session_id)

    async def find(self, session_id: str) -> Session | None:
        """The session with that id, read back if need be, and used just now; None when it is not held.

        Nothing waits between that and the next step of whoever asks. Raises `StoreError`.
        """
        session = self._in_memory.get(session_id)
        if session is None and session_id in self._stubs:
            session = await self._read_back(session_id)
        self._use(session_id)
        return session

    async def find_by_key(self, api_key: str) -> Session | None:
        """The session with that key, likewise.

        A key is found by its digest and then compared, so that no time says how much of it is right.
        """
        session_id = self._by_key.get(_digest(api_key))
        session = None if session_id is None else await self.find(session_id)
        return session if session is not None and is_same(api_key, session.api_key) else None

    def hold(self, session: Session) -> None:
        """Hold `session` from now on, as used just now."""
        self._in_memory[session.session_id] = session
        self._by_key[_digest(session.api_key)] = session.session_id
        self._uses.begin(session.session_id)
        self._tries.begin(session.session_id)
        self._tell()

    def take(self, session: Session) -> Session | SessionStub:
        """`session`, which an earlier server has left, as it is to be held: paged out where sessions are.

        So a restart needs no more memory than the server before it. Called in another thread.
        """
        doubtful = session.doubt_deliveries()
        if self._page_out_s is None:
            return session
        stub = stub_of(session, _digest(session.api_key), self._is_comparable)
        return replace(stub, deliveries=dict.fromkeys(doubtful, False))

    def hold_left(self, held: Session | SessionStub) -> None:
        """Hold what `take` has made from now on."""
        if isinstance(held, Session):
            self.hold(held)
            return
        self._stubs[held.session_id] = held
        self._by_key[held.key_digest] = held.session_id
        self._rests.begin(held.session_id)
        self._tell()

    def forget(self, held: Session | SessionStub) -> None:
        """Hold it no longer."""
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
        """Put `stub` in the place of the one with its id; whether it is another one."""
        before, self._stubs[stub.session_id] = self._stubs[stub.session_id], stub
        return before is not stub

    def has_call(self, session_id: str) -> bool:
        """A call of that session is under way, admitted or not."""
        return self._uses.is_in_use(session_id)

    @contextmanager
    def in_use(self, session: Session) -> Iterator[None]:
        """`session` is not idle in the block, and has just been used after it."""
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
        """The session in the block, or None; if it was paged out, it is again after it, unless somebody has used it.

        That is no use of it. Raises `StoreError` when it cannot be read back.
        """
        was_paged_out = isinstance(self.look(session_id), SessionStub)
        session = await self._read_back(session_id) if was_paged_out else self._in_memory.get(session_id)
        last_use = self._uses.last_use(session_id)
        with self._uses.kept(session_id):
            yield session
        if was_paged_out and session is not None and self._uses.last_use(session_id) == last_use:
            await self._page_out(session)

    def find_unused(self, seconds: float) -> list[Session | SessionStub]:
        """Some of the sessions that nobody has used for so long."""
        resting_s = max(0.0, seconds - (self._page_out_s or 0.0))
        unused = [
            *self._rests.find_unused(resting_s, _BATCH, self._is_busy),
            *self._uses.find_unused(seconds, _BATCH, self._is_busy),
        ]
        return [held for session_id in unused if (held := self.look(session_id)) is not None]

    async def page_out_idle(self) -> int:
        """Page out some of the sessions that nobody has used for the time that is set; returns how many.

        One that cannot be let go now is looked at again when it has been idle for as long once more; that is no use.
        """
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
            for turn in find_unnoted(session, kept):  # so that it may be let go the next time
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
        """The session with that id in memory again; None when it is no longer held. It is read by one at a time."""
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
                finally:  # whoever reads may be cancelled, or fail: then one of those who wait tries
                    del self._readings[session_id]
                    reading.set()
                stub = self._stubs.get(session_id)  # of now: it may have been drained, or closed, meanwhile
                if stub is not None:
                    bring_back(stub, session)
                    self._return(session)
                    self._metrics.session_read_back(perf_counter() - began)
        return self._in_memory.get(session_id)

    def _return(self, session: Session) -> None:
        """Hold a session in memory again that is paged out."""
        session_id = session.session_id
        del self._stubs[session_id]
        self._let_go.pop(session_id, None)
        self._rests.end(session_id)
        self.hold(session)

    def _use(self, session_id: str) -> None:
        """Note that a session was used just now."""
        self._uses.use(session_id)
        self._tries.use(session_id)

    def _is_in_use(self, session_id: str) -> bool:
        return self._uses.is_in_use(session_id) or self._is_busy(session_id)

    def _is_busy(self, session_id: str) -> bool:
        session = self.look(session_id)
        return session is not None and bool(session.turns_in_flight)  # though nobody may wait for them any more

    def _tell(self) -> None:
        self._metrics.sessions_held(len(self), len(self._stubs))


def _digest(api_key: str) -> bytes:
    return sha256(api_key.encode()).digest()
