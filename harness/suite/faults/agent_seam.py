"""Agents' side of a session server: an ASGI wrapper that records errors, repeats requests and drops calls.

Repeats are byte for byte; dropped calls end as in a killed process. Everything else passes unchanged.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.dialects.dialect import is_call
from harness.machine.http_protocol import CONNECTION, connection_of


class ErrorAnswer(NamedTuple):
    at: float
    """Monotonic time."""
    session_id: str
    words: str
    """Status and code: `404 session_closed`."""


@dataclass(eq=False)
class _Arrival:
    """One arrival of a model call, with its own `Connection`."""

    arrived_in: Scope
    body: bytes
    send: Send
    on_lost: Callable[[], None] | None = None
    has_answered: bool = False
    _has_left: asyncio.Event = field(default_factory=asyncio.Event)
    _was_read: bool = False

    def __post_init__(self) -> None:
        self._carrier = connection_of(self.arrived_in)
        self.peer = None if self._carrier is None else self._carrier.peer
        self.scope = {**self.arrived_in, "state": {**self.arrived_in.get("state", {}), CONNECTION: self}}

    def leave(self) -> None:
        self._has_left.set()
        # The application notices a lost connection one loop iteration later; a retry may be faster.
        asyncio.get_running_loop().call_soon(self._tell_lost)

    def _tell_lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()

    async def receive(self) -> Message:
        """Return the body, then a disconnect when the client leaves."""
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def answer(self, message: Message) -> None:
        """Forward a part of the answer unless the client left."""
        if not self.is_lost:
            self.has_answered = True
            await self.send(message)

    @property
    def is_lost(self) -> bool:
        return self._has_left.is_set()

    @property
    def on_reset(self) -> Callable[[], None] | None:
        """See `Connection`. Only the agent's connection can be reset."""
        return None if self._carrier is None else self._carrier.on_reset

    @on_reset.setter
    def on_reset(self, callback: Callable[[], None] | None) -> None:
        if self._carrier is not None:
            self._carrier.on_reset = callback

    def is_closed_by_client(self) -> bool:
        return self.is_lost or (self._carrier is not None and self._carrier.is_closed_by_client())

    def is_reset(self) -> bool:
        return self.is_lost or (self._carrier is not None and self._carrier.is_reset())


class AgentSeam:
    def __init__(self) -> None:
        self.error_answers: list[ErrorAnswer] = []
        self._repetitions: defaultdict[str, list[asyncio.Event]] = defaultdict(list)
        """Repeat events of model calls under way, by session."""
        self._answering: set[asyncio.Task[None]] = set()
        self._dropped: set[asyncio.Task[None]] = set()

    def around(self, app: ASGIApp) -> ASGIApp:
        async def handle(scope: Scope, receive: Receive, send: Send) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._answering.add(task)
            try:
                await self._handle(app, scope, receive, send)
            except asyncio.CancelledError:
                if task not in self._dropped:
                    raise
                # A killed process reports nothing, so the cancellation must not propagate.
                task.uncancel()
            finally:
                self._answering.discard(task)
                self._dropped.discard(task)

        return handle

    def repeat(self, session_id: str) -> int:
        """Repeat a session's calls under way. Returns their number."""
        repetitions = self._repetitions[session_id]
        for repetition in repetitions:
            repetition.set()
        return len(repetitions)

    def drop(self) -> None:
        """Cancel every call under way without an answer."""
        for task in list(self._answering):
            self._dropped.add(task)
            task.cancel()

    async def _handle(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if not (path.startswith("/sessions/") and is_call(path)):
            await app(scope, receive, send)
            return
        body, is_whole = bytearray(), False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            is_whole = not message.get("more_body")
        session_id = path.split("/")[2]
        first = _Arrival(scope, bytes(body), self._keep_errors(session_id, send))
        repetition = asyncio.Event()
        self._repetitions[session_id].append(repetition)
        try:
            await _answer(app, first, repetition, receive)
        finally:
            self._repetitions[session_id].remove(repetition)

    def _keep_errors(self, session_id: str, send: Send) -> Send:
        status = HTTPStatus.OK.value

        async def keep_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= HTTPStatus.BAD_REQUEST and not message.get("more_body"):
                try:
                    code = json.loads(message.get("body", b""))["error"]["code"]
                except (ValueError, LookupError, TypeError):  # of another form, or without a body
                    code = None
                words = f"{status} {code if isinstance(code, str) else ''}".strip()
                self.error_answers.append(ErrorAnswer(time.monotonic(), session_id, words))
            await send(message)

        return keep_and_send


async def _answer(app: ASGIApp, first: _Arrival, repetition: asyncio.Event, receive: Receive) -> None:
    """Answer a call. If it is repeated before its answer begins, send the repetition's answer."""
    arrivals = [first]

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        arrivals[-1].leave()

    async def answer(arrival: _Arrival) -> None:
        await app(arrival.scope, arrival.receive, arrival.answer)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        repeated = tasks.create_task(repetition.wait())
        answered = tasks.create_task(answer(first))
        try:
            await asyncio.wait({answered, repeated}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done() and not first.has_answered:
                arrivals.append(_Arrival(first.arrived_in, first.body, first.send))
                first.leave()  # like a client that timed out
                await answer(arrivals[-1])
            await asyncio.wait({answered})
        finally:
            watching.cancel()
            repeated.cancel()
