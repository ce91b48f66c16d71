"""The side of a session server that agents see: what they are told, and requests that arrive more than once.

An ASGI application around that of the server. It keeps every answer that is no success, so that a report can say what
an agent was told, repeats a request byte for byte, and can give up everything that is being answered, as a process does
that is killed. Requests and answers pass through unchanged.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CALL_PATH = "/v1/chat/completions"


class Told(NamedTuple):
    """An answer to a model call that is no success."""

    at: float
    """On the monotonic clock."""
    session_id: str
    words: str
    """Status and code, `404 session_closed`."""


class _Code(msgspec.Struct, frozen=True):
    code: str | None = None


class _ErrorBody(msgspec.Struct, frozen=True):
    error: _Code = _Code()


@dataclass(eq=False, slots=True)
class _Connection:
    """One arrival of a model call: its end as the application sees it."""

    scope: Scope
    body: bytes
    send: Send
    has_left: asyncio.Event = field(default_factory=asyncio.Event)
    has_answered: bool = False
    _was_read: bool = False

    async def receive(self) -> Message:
        """The body, once; then the end of the connection."""
        if not self._was_read:
            self._was_read = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def answer(self, message: Message) -> None:
        """Hand on a part of the answer, unless nobody reads it."""
        if not self.has_left.is_set():
            self.has_answered = True
            await self.send(message)

    def leave(self) -> None:
        """The client closes the connection."""
        self.has_left.set()

    async def through(self, app: ASGIApp) -> None:
        """Have `app` answer it."""
        await app(self.scope, self.receive, self.answer)

    def again(self) -> "_Connection":
        """The same bytes once more, answered to whoever waited for the answer to this one."""
        return _Connection(self.scope, self.body, self.send)


@dataclass(eq=False, slots=True)
class _ModelCall:
    """A model call under way."""

    is_repeated: asyncio.Event = field(default_factory=asyncio.Event)


class AgentSeam:
    """What stands between agents and the session server of a scenario with faults."""

    def __init__(self) -> None:
        self.told: list[Told] = []
        self._calls: defaultdict[str, list[_ModelCall]] = defaultdict(list)
        self._answering: set[asyncio.Task[None]] = set()
        self._dropped: set[asyncio.Task[None]] = set()

    def around(self, app: ASGIApp) -> ASGIApp:
        """`app`, seen through this seam."""

        async def seen(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answered(lambda: self._handle(app, scope, receive, send))

        return seen

    def repeat(self, session_id: str) -> int:
        """The model calls of the session that are under way arrive again; returns how many there are."""
        calls = self._calls[session_id]
        for call in calls:
            call.is_repeated.set()
        return len(calls)

    def drop(self) -> None:
        """Give up every request that is being answered; nobody is told."""
        for task in list(self._answering):
            self._dropped.add(task)
            task.cancel()

    async def _answered(self, handle: Callable[[], Awaitable[None]]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            await handle()
        except asyncio.CancelledError:
            if task not in self._dropped:
                raise
            task.uncancel()  # the process would be gone: there is nobody to be told of a cancellation
        finally:
            self._answering.discard(task)
            self._dropped.discard(task)

    async def _handle(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if not (path.startswith("/sessions/") and path.endswith(_CALL_PATH)):
            await app(scope, receive, send)
            return
        session_id = path.split("/")[2]
        body = await _whole_body(receive)
        if body is None:
            return
        first = _Connection(scope, body, self._witnessed(session_id, send))
        async with self._under_way(session_id) as call:
            await _played(app, first, call, receive)

    @asynccontextmanager
    async def _under_way(self, session_id: str) -> AsyncIterator[_ModelCall]:
        call = _ModelCall()
        self._calls[session_id].append(call)
        try:
            yield call
        finally:
            self._calls[session_id].remove(call)

    def _witnessed(self, session_id: str, send: Send) -> Send:
        """`send`, which remembers what an agent is told when it is no success."""
        status = HTTPStatus.OK.value

        async def witnessed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif status >= HTTPStatus.BAD_REQUEST and not message.get("more_body"):
                self.told.append(
                    Told(time.monotonic(), session_id, f"{status} {_code_of(message.get('body', b''))}".strip())
                )
            await send(message)

        return witnessed


async def _played(app: ASGIApp, first: _Connection, call: _ModelCall, receive: Receive) -> None:
    """Answer `first`; when its call is repeated before that, the agent reads the answer to the repetition."""
    connections = [first]

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        connections[-1].leave()

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch())
        repeated = tasks.create_task(call.is_repeated.wait())
        answered = tasks.create_task(first.through(app))
        try:
            await asyncio.wait({answered, repeated}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done() and not first.has_answered:
                connections.append(first.again())
                first.leave()  # as a client does that timed out; its retry may be quicker than its end
                await connections[-1].through(app)
            await asyncio.wait({answered})
        finally:
            watching.cancel()
            repeated.cancel()


async def _whole_body(receive: Receive) -> bytes | None:
    """The body of a request; None when its client left before its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


def _code_of(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.code or ""
    except msgspec.DecodeError:
        return ""
