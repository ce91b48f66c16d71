"""The client at the other end of a request, and all of them together.

A model call can take minutes. Work that waits on behalf of a client asks here, or is called, the moment nobody is to
wait for it any more: it has left, or the server dismisses it, because its session was ended or the server stops. The
reason for the dismissal ends the work and is the answer.

A server that stops gives each of its callers one, in this order: nobody new is let in, those who are there get a while
to end by themselves, then they are dismissed, and their engines get a while to hand over what they have.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Self

from starlette.requests import Request

from harness.dialects.request_limits import RequestLimits
from harness.errors import ClientLeft, HarnessError, ServerStopping, TooMany
from harness.machine.deadlines import within
from harness.machine.http_protocol import Connection, connection_of
from harness.machine.log import get_logger
from harness.machine.peer_processes import LOOK_S, Peer, PeerProcesses
from harness.sessions.session import Session
from harness.telemetry.secrets import shorten_secrets
from harness.telemetry.tracing.spans import read_traceparent
from harness.types import Json

HAND_OVER_S = 5.0
"""Long enough for an engine to notice an abort between two tokens; a client that comes back waits for it."""

SERVER_STOPPED = "server_stopped"
"""Logged once when a server has sent everybody away."""

_LONGEST_COUNT = 9  # digits
_LONGEST_NOTE = 200  # characters of a header
_MOST_NOTES = 8
_OWN_ID = re.compile(r"(^|[-_])(session|thread|conversation)[-_](id|affinity)$")  # names of headers
_LAST_HAND_OVER_S = 3.0  # of an engine, when the server stops
_ANSWER_S = 1.0  # to write a turn to the disk and its answer to the connection, once an engine has given up

log = get_logger(__name__)


class ClientConnection:
    """One request's client.

    Args:
        connection: Carries the request; None where nobody can tell whether the client is there.
        headers: Of the request, with lower-case names.
    """

    def __init__(self, connection: Connection | None, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self._callbacks: list[Callable[[], None]] = []
        self.has_left = False
        self.dismissal: HarnessError | None = None
        """Why nothing more is to be waited for on its behalf; None as long as it is served."""
        self.hand_over_s = HAND_OVER_S
        """The time an engine gets, from the dismissal on, to hand over what it has sampled for the client."""
        self.held_s = 0.0
        """Seconds that it has been held so far, at the gate or for an update of the weights."""
        self.headers = headers
        self.idempotency_key = headers.get("idempotency-key", "")
        count = headers.get("x-stainless-retry-count", "")  # of the SDKs of OpenAI and Anthropic
        self.says_retry = bool(self.idempotency_key) or (
            count.isdecimal() and len(count) <= _LONGEST_COUNT and int(count) > 0
        )
        """The client says that it has asked before."""

    def notes(self) -> Json:
        """What it says of itself, for the record of its turns: its program, the ids of its own that it sends, its span.

        Keys of the harness and session ids among them are shortened: a record is kept, and read by others. Its process
        is there as soon as it is known.
        """
        return self._said | self._process_note()

    @cached_property
    def _said(self) -> Json:
        own = {name: _noted(value) for name, value in self.headers.items() if _OWN_ID.search(name)}
        agent = _noted(self.headers.get("user-agent", ""))
        ids: Json = {"ids": dict(list(own.items())[:_MOST_NOTES])} if own else {}
        span = read_traceparent(self.headers.get("traceparent", ""))
        return {"user_agent": agent} | ids | ({} if span is None else {"traceparent": span})

    def look_up(self, processes: PeerProcesses, session: Session) -> None:
        """Begin to look up the process that made a call of `session`, once for each connection.

        A client that connects for every call is most likely the process of the last one.
        """
        peer = self._peer
        if peer is not None and peer.process is None:
            turns = session.turns
            last: Json = turns[-1].notes.get("client", {}).get("process", {}) if turns else {}
            peer.process = processes.find(peer.ends._replace(likely=int(last.get("id", "0").partition(".")[0])))

    async def know_process(self) -> None:
        """Return when the look-up of the process has ended, or nobody waits for an answer any more."""
        process = None if self._peer is None else self._peer.process
        if process is not None and not process.done() and self.dismissal is None:
            await asyncio.wait([process], timeout=LOOK_S)

    @property
    def _peer(self) -> Peer | None:
        return None if self._connection is None else self._connection.peer

    def _process_note(self) -> Json:
        found = None if self._peer is None else self._peer.process
        process = found.result() if found is not None and found.done() else None
        if process is None:
            return {}
        return {"process": {**process._asdict(), "program": shorten_secrets(process.program)}}

    @classmethod
    def of(cls, request: Request) -> Self:
        """The client that has sent `request`."""
        return cls(connection_of(request.scope), request.headers)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Notice inside the block when the client leaves."""
        connection = self._connection
        if connection is None:
            yield
            return
        connection.on_lost = leave = self._leave
        try:
            if connection.is_lost:
                leave()
            yield
        finally:
            if connection.on_lost is leave:  # the next request on it may have begun: then it is that one's
                connection.on_lost = None

    def _leave(self) -> None:
        self.has_left = True
        self.dismiss(ClientLeft("the client left before its answer; the same request goes on with the turn"))

    def dismiss(self, reason: HarnessError, *, hand_over_s: float = HAND_OVER_S) -> None:
        """End every wait on behalf of the client; the first reason counts, and the shortest time to hand over."""
        if self.dismissal is None:
            self.dismissal, self.hand_over_s = reason, hand_over_s
        elif hand_over_s < self.hand_over_s:
            self.hand_over_s = hand_over_s
        else:
            return
        for callback in list(self._callbacks):
            callback()

    @contextmanager
    def on_dismissal(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call `callback` when the client is dismissed inside the block; at once when that has happened already."""
        if self.dismissal is not None:
            callback()
        self._callbacks.append(callback)
        try:
            yield
        finally:
            self._callbacks.remove(callback)

    def require_there(self) -> None:
        """Raises the reason for its dismissal: `ClientLeft` when nobody waits any more."""
        if self.dismissal is not None:
            raise self.dismissal

    @contextmanager
    def held(self) -> Iterator[None]:
        """Count the seconds of the block in `held_s`, however it ends."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.held_s += time.monotonic() - began

    @asynccontextmanager
    async def patience(self, seconds: float | None = None) -> AsyncIterator[None]:
        """Waiting on behalf of the client; raises the reason inside the block when it is dismissed.

        Raises `TimeoutError` after `seconds`. A dismissal moves that deadline to now: so it reaches the block as a
        timeout does, at its next wait. A `TimeoutError` of the block's own goes its way.
        """
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            if not deadline.expired():
                deadline.reschedule(loop.time())

        try:
            async with asyncio.timeout(seconds) as deadline:
                with self.on_dismissal(give_up):
                    yield
        except TimeoutError:
            if deadline.expired():
                self.require_there()
            raise


class CallPlaces:
    """Places for the model calls of each session, which has one key: so many at one time, with so many bytes."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def take(self, session_id: str) -> Iterator[Callable[[int], None]]:
        """A place for a call of that session in the block, which counts the bytes of its body with the value.

        Both raise `TooMany`. A call has its place from before its body arrives until its answer is written.
        """
        if self._calls[session_id] >= self._limits.calls:
            raise _too_many("calls", self._limits.calls)
        self._calls[session_id] += 1
        own = 0

        def count(size_bytes: int) -> None:
            nonlocal own
            own += size_bytes
            self._bytes[session_id] += size_bytes
            if self._bytes[session_id] > self._limits.calls_bytes:
                raise _too_many("calls_bytes", self._limits.calls_bytes)

        try:
            yield count
        finally:
            self._bytes[session_id] -= own
            self._calls[session_id] -= 1
            if not self._calls[session_id]:
                del self._calls[session_id], self._bytes[session_id]


class Callers:
    """The clients whose requests are being worked on now."""

    def __init__(self) -> None:
        self._present: set[ClientConnection] = set()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self.is_stopping = False
        """Nobody new is let in."""

    def __len__(self) -> int:
        return len(self._present)

    @contextmanager
    def present(self, client: ClientConnection) -> Iterator[None]:
        """Work for `client` in the block. Raises `ServerStopping` when the server lets nobody in any more."""
        if self.is_stopping:
            raise _stopping()
        self._present.add(client)
        self._nobody.clear()
        try:
            yield
        finally:
            self._present.discard(client)
            if not self._present:
                self._nobody.set()

    @asynccontextmanager
    async def attend(self, client: ClientConnection) -> AsyncIterator[None]:
        """Work for `client` in the block that takes a while, and ends with `ServerStopping` when the server does."""
        with self.present(client):
            async with client.patience():
                yield

    async def send_away(self, *, grace_s: float) -> None:
        """Let nobody in, and return when everybody has been answered; after `grace_s` those who are left are told."""
        self.is_stopping = True
        before = len(self)
        has_ended = await within(grace_s, self._nobody.wait())
        told = len(self)
        if not has_ended:
            self.dismiss(hand_over_s=_LAST_HAND_OVER_S)
            await within(_LAST_HAND_OVER_S + _ANSWER_S, self._nobody.wait())
        log.info(SERVER_STOPPED, requests=before, cut_short=told, unanswered=len(self))

    def dismiss(self, *, hand_over_s: float) -> None:
        """Tell everybody that the server stops; what their engines have they hand over within `hand_over_s`."""
        for client in list(self._present):
            client.dismiss(_stopping(), hand_over_s=hand_over_s)


def _noted(header: str) -> str:
    return shorten_secrets(header)[:_LONGEST_NOTE]


def _too_many(limit: str, most: int) -> TooMany:
    return TooMany(
        f"expected at most {most} {limit.replace('_', ' ')} of a session at one time (the server's limit `{limit}`);"
        " ask again when another one has ended",
        limit=limit,
    )


def _stopping() -> ServerStopping:
    return ServerStopping("the server stops; ask the next one, the same request goes on where this one ended")
