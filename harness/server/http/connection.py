"""The client of a request, and all clients together.

Work on behalf of a client ends when the client disconnects, or when the server dismisses it because its session ended
or the server stops. The reason for the dismissal is the answer.

A stopping server refuses new requests, lets current ones end for a while, then dismisses the rest, and their engines
get a while to hand over output.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple, Self

from starlette.requests import Request

from harness.dialects.request_limits import RequestLimits
from harness.errors import ClientLeft, HarnessError, ServerStopping, TooMany
from harness.machine.deadlines import Deadline, within
from harness.machine.http_protocol import Connection, connection_of
from harness.machine.log import get_logger
from harness.machine.peer_processes import LOOK_S, Peer, PeerProcesses
from harness.server.telemetry.printable import shorten_secrets
from harness.server.telemetry.tracing.spans import read_traceparent
from harness.sessions.session import Session
from harness.types import Json

HAND_OVER_S = 5.0
"""Enough for an engine to notice an abort between two tokens. A returning client waits for it."""

SERVER_STOPPED = "server_stopped"
"""Logged once all clients have been sent away."""

_LONGEST_COUNT = 9  # digits
_LONGEST_NOTE = 200  # characters of a header
_MOST_NOTES = 8
_find_own_id = lru_cache(512)(re.compile(r"(^|[-_])(session|thread|conversation)[-_](id|affinity)$").search)
_LAST_HAND_OVER_S = 3.0  # for an engine when the server stops
_ANSWER_S = 1.0  # to store a turn and write its answer, once an engine has given up

log = get_logger(__name__)


class ClientConnection:
    """Client of one request, with lower-case `headers`. `connection` is None if a disconnect cannot be seen."""

    def __init__(self, connection: Connection | None, headers: Mapping[str, str]) -> None:
        self._connection = connection
        self._callbacks: list[Callable[[], None]] = []
        self.has_left = False
        self.dismissal: HarnessError | None = None
        """Reason to stop all work on its behalf, or None."""
        self.hand_over_s = HAND_OVER_S
        """Seconds from the dismissal for an engine to hand over its output."""
        self.held_s = 0.0
        """Seconds held so far, at the gate or for a weight update."""
        self.headers = headers
        self.idempotency_key = headers.get("idempotency-key", "")
        count = headers.get("x-stainless-retry-count", "")  # sent by the OpenAI and Anthropic SDKs
        self.says_retry = bool(self.idempotency_key) or (
            count.isdecimal() and len(count) <= _LONGEST_COUNT and int(count) > 0
        )
        """True if the client declares a retry."""

    def notes(self) -> Json:
        """Return the client's program, ids, span and process, for the turn's record. Shortens secrets."""
        own = {name: _noted(value) for name, value in self.headers.items() if _find_own_id(name)}
        agent = _noted(self.headers.get("user-agent", ""))
        ids: Json = {"ids": dict(list(own.items())[:_MOST_NOTES])} if own else {}
        span = read_traceparent(self.headers.get("traceparent", ""))
        traced = {} if span is None else {"traceparent": span}
        return {"user_agent": agent} | ids | traced | self._process_note()

    def look_up(self, processes: PeerProcesses, session: Session) -> None:
        """Look up the client's process, once per connection; try the last call's first, as clients may reconnect."""
        peer = self._peer
        if peer is not None and peer.process is None:
            turns = session.turns
            last: Json = turns[-1].notes.client.get("process", {}) if turns else {}
            peer.process = processes.find(peer.ends._replace(likely=int(last.get("id", "0").partition(".")[0])))

    async def know_process(self) -> None:
        """Return when the process lookup ends, or the client is dismissed."""
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
        headers: dict[str, str] = {}
        for name, value in request.headers.items():
            headers.setdefault(name, value)  # the first of repeated ones
        return cls(connection_of(request.scope), headers)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Detect a disconnect within the block."""
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
            if connection.on_lost is leave:  # otherwise the connection's next request has begun and owns it
                connection.on_lost = None

    def _leave(self) -> None:
        self.has_left = True
        self.dismiss(ClientLeft("the client disconnected before its answer; the same request continues the turn"))

    def dismiss(self, reason: HarnessError, *, hand_over_s: float = HAND_OVER_S) -> None:
        """End every wait on behalf of the client. The first reason and the shortest time to hand over count."""
        if self.dismissal is None:
            self.dismissal, self.hand_over_s = reason, hand_over_s
        elif hand_over_s < self.hand_over_s:
            self.hand_over_s = hand_over_s
        else:
            return
        for callback in list(self._callbacks):
            callback()

    def on_dismissal(self, callback: Callable[[], None]) -> "_OnDismissal":
        """Call `callback` on a dismissal within the block, or at once after one."""
        if self.dismissal is not None:
            callback()
        return _OnDismissal(self._callbacks, callback)

    def require_there(self) -> None:
        """Raise the reason for the dismissal, if any."""
        if self.dismissal is not None:
            raise self.dismissal

    @contextmanager
    def held(self) -> Iterator[None]:
        """Add the duration of the block to `held_s`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.held_s += time.monotonic() - began

    @contextmanager
    def patience(self, seconds: float | None = None) -> Iterator[None]:
        """Raise the reason for a dismissal within the block, or `TimeoutError` after `seconds`."""
        try:
            # A dismissal moves the deadline to now, so it interrupts the next `await` of the block like a timeout. A
            # `TimeoutError` of the block itself propagates.
            with Deadline(seconds) as deadline, self.on_dismissal(deadline.move):
                yield
        except TimeoutError:
            if deadline.has_passed:
                self.require_there()
            raise


class _OnDismissal(NamedTuple):  # each turn enters four: a generator costs three times as much
    callbacks: list[Callable[[], None]]
    callback: Callable[[], None]

    def __enter__(self) -> None:
        self.callbacks.append(self.callback)

    def __exit__(self, *exc_info: object) -> None:
        self.callbacks.remove(self.callback)


class CallPlaces:
    """Limits on concurrent model calls of each session."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextmanager
    def take(self, session_id: str) -> Iterator[Callable[[int], None]]:
        """Reserve a place for a call, and yield a function that counts its body's bytes.

        Both raise `TooMany`. The call keeps its place until its answer is written.
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
    def __init__(self) -> None:
        self._present: set[ClientConnection] = set()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self.is_stopping = False
        """True once new requests are refused."""

    def __len__(self) -> int:
        return len(self._present)

    @contextmanager
    def present(self, client: ClientConnection) -> Iterator[None]:
        """Register `client` within the block. Raises `ServerStopping` once the server stops."""
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

    @contextmanager
    def attend(self, client: ClientConnection) -> Iterator[None]:
        """Register `client` for long work, which a stop ends with `ServerStopping`."""
        with self.present(client), client.patience():
            yield

    async def send_away(self, *, grace_s: float) -> None:
        """Refuse new requests, dismiss clients left after `grace_s`, and return when all are answered."""
        self.is_stopping = True
        before = len(self)
        has_ended = await within(grace_s, self._nobody.wait())
        told = len(self)
        if not has_ended:
            self.dismiss(hand_over_s=_LAST_HAND_OVER_S)
            await within(_LAST_HAND_OVER_S + _ANSWER_S, self._nobody.wait())
        log.info(SERVER_STOPPED, requests=before, cut_short=told, unanswered=len(self))

    def dismiss(self, *, hand_over_s: float) -> None:
        for client in list(self._present):
            client.dismiss(_stopping(), hand_over_s=hand_over_s)


def _noted(header: str) -> str:
    return shorten_secrets(header)[:_LONGEST_NOTE]


def _too_many(limit: str, most: int) -> TooMany:
    return TooMany(
        f"expected at most {most} {limit.replace('_', ' ')} of a session at once (the server's limit `{limit}`);"
        " retry when another one has ended",
        limit=limit,
    )


def _stopping() -> ServerStopping:
    return ServerStopping("the server is stopping; send the same request to the next one, which continues this turn")
