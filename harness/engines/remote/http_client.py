"""HTTP client of one engine server: JSON and event streams in, values or typed errors out.

    never reached, 429, 503             EngineUnavailable
    any other 4xx                       EngineRejected, with the server's message
    any other status                    EngineError, with the server's message
    connection broke after the request  EngineConnectionLost
    not UTF-8, not JSON, wrong shape    EngineReplyInvalid

Every call has a deadline. No POST is repeated; a GET on a closed connection is. Redirects and environment proxies are
ignored.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from harness.decoding import read_json
from harness.engines.remote.address import ENGINE_KEY, EngineAddress
from harness.engines.remote.http_bodies import EventBuffer, LineTooLong, error_for_status, excerpt, server_message
from harness.engines.remote.http_connection import CannotConnect, EngineConnection, EngineConnections, StaleConnection
from harness.errors import EngineConnectionLost, EngineRejected, EngineReplyInvalid, EngineUnavailable
from harness.machine.deadlines import Deadline
from harness.types import Json

_T = TypeVar("_T")
_R = TypeVar("_R")

# At 50 tokens a second events arrive in threes, since this is just over two of their intervals, and wait 20 ms on
# average.
GATHER_S = 0.041
"""Seconds that events gather for a live reader."""

_LARGE_BYTES = 200_000  # decoding takes some milliseconds


class HttpAnswer(NamedTuple):
    status: int
    content: bytes


class HttpCall(msgspec.Struct, frozen=True):
    method: str
    path: str
    deadline_s: float
    body: Json | Sequence[bytes | memoryview] | None = None
    """Object, or parts of its JSON."""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    request_id: str = ""
    """Generation it belongs to, if any."""
    row_bytes: int = 0
    """Most bytes of rows in a line of its answer."""


class EngineClient:
    """EngineConnections to one engine server.

    Args:
        url: See `EngineAddress`; may have a path prefix.
        engine: Engine kind, for messages.
        api_key: Used if the address names no key; empty takes the environment's.
    """

    def __init__(self, url: str, engine: str, *, api_key: str = "") -> None:
        address = EngineAddress.parse(url)
        key = address.api_key(os.environ, api_key)
        self.url = address.url
        self.name = f"{engine} at {self.url}"
        parts = urlsplit(self.url)
        self._prefix = parts.path
        self._headers = {"host": parts.netloc} | ({"authorization": f"Bearer {key}"} if key else {})
        self.since = uuid4().hex
        """Identifies the lifetime of this client."""
        self.generations_sent = 0
        self._connections: EngineConnections | None = None
        self._reader: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Create the unbounded connection pool; needs the running loop."""
        self._connections = EngineConnections(self.url)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-replies")

    async def close(self) -> None:
        """Close every connection. Idempotent."""
        connections, self._connections = self._connections, None  # first, so that no call uses a closing one
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.shutdown(wait=False)
        if connections is not None:
            await connections.close()

    async def get(self, path: str, kind: type[_T], *, deadline_s: float) -> _T:
        return await self.call(HttpCall("GET", path, deadline_s), kind)

    async def post(self, path: str, body: Json, *, deadline_s: float) -> HttpAnswer:
        """POST `body` and return the undecoded answer. Raises unless it succeeded."""
        call = HttpCall("POST", path, deadline_s, body)
        return self._require_success(call, await self.ask(call))

    async def get_text(self, path: str, *, deadline_s: float) -> str:
        call = HttpCall("GET", path, deadline_s)
        return self._require_success(call, await self.ask(call)).content.decode("utf-8", errors="replace")

    async def call(self, call: HttpCall, kind: type[_T]) -> _T:
        """Decode a successful answer; raise as in the table above."""
        return await self.call_for(call, kind, lambda value: value)

    async def call_for(self, call: HttpCall, kind: type[_T], read: Callable[[_T], _R]) -> _R:
        """Decode a successful answer and apply `read`, off the event loop if large."""
        content = self._require_success(call, await self.ask(call)).content
        return await self.apart(len(content), lambda: read(self.decode(call, content, kind)))

    async def apart(self, size_bytes: int, work: Callable[[], _R]) -> _R:
        """Run `work` on a reply of that size, off the event loop if large."""
        if size_bytes <= _LARGE_BYTES or self._reader is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    async def ask(self, call: HttpCall) -> HttpAnswer:
        """Return the answer with any status."""
        connections = self._require_open()
        with _NamedFailures(self.name, call), Deadline(call.deadline_s):
            while True:
                connection = await self._send(connections, call)
                try:
                    content = await connection.read_all()
                    return HttpAnswer(connection.status, content)
                except StaleConnection:
                    if call.method != "GET":
                        raise
                finally:
                    connections.end(connection)

    async def events(self, call: HttpCall) -> AsyncGenerator[list[bytes]]:
        """Yield payloads of events as they come; leaving early closes the connection. Reading counts as waiting."""
        connections, buffer = self._require_open(), EventBuffer(call.row_bytes)
        deadline = asyncio.get_running_loop().time() + call.deadline_s
        with _NamedFailures(self.name, call):
            async with asyncio.timeout_at(deadline):
                connection = await self._send(connections, call)
        try:
            while not buffer.is_done:
                with _NamedFailures(self.name, call):
                    async with asyncio.timeout_at(deadline):
                        payloads = await self._read_events(call, connection, buffer, connection.read_some)
                if payloads:
                    yield payloads
        finally:
            connections.end(connection)

    async def gather_events(
        self, call: HttpCall, payloads: list[bytes], hear: Callable[[], Awaitable[None]], *, gather_s: float
    ) -> None:
        """Append the payloads of a stream's events to `payloads`; keep them if the stream breaks.

        `hear` is awaited after the first event, then `gather_s` after the first of each batch, after a megabyte, and at
        the end. Its time counts against the deadline.
        """
        connections, buffer = self._require_open(), EventBuffer(call.row_bytes)
        with _NamedFailures(self.name, call), Deadline(call.deadline_s):
            connection = await self._send(connections, call)
            read = connection.read_some
            try:
                while not buffer.is_done:
                    come = await self._read_events(call, connection, buffer, read)
                    payloads += come
                    if come:
                        await hear()
                        read = partial(connection.gather, gather_s)
            finally:
                with suppress(LineTooLong):
                    payloads += buffer.feed(connection.take())
                connections.end(connection)

    async def _read_events(
        self, call: HttpCall, connection: EngineConnection, buffer: EventBuffer, read: Callable[[], Awaitable[bytes]]
    ) -> list[bytes]:
        data = await read()
        if not 200 <= connection.status < 300:
            self._require_success(call, HttpAnswer(connection.status, data + await connection.read_all()))
        if not data:
            raise EngineConnectionLost(f"{self.name}: the stream of {_what(call)} ended without [DONE]")
        try:
            return buffer.feed(data)
        except LineTooLong as error:
            raise EngineReplyInvalid(f"{self.name}: {_what(call)} streamed {error}") from error

    def decode(self, call: HttpCall, content: bytes, kind: type[_T]) -> _T:
        try:
            # The decoder skips fields that `kind` does not have without looking at their bytes.
            content.isascii() or content.decode("utf-8")
            return read_json(content, kind)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise EngineReplyInvalid(
                f"{self.name}: expected another answer to {_what(call)}, got {excerpt(content)}"
                f" ({error}); check the version of the server"
            ) from error

    def _require_open(self) -> EngineConnections:
        if self._connections is None:
            raise EngineUnavailable(f"{self.name} is not connected; use the provider inside `async with`")
        return self._connections

    async def _send(self, connections: EngineConnections, call: HttpCall) -> EngineConnection:
        headers = {**self._headers, **call.headers}
        # A POST that changes something gets a new connection. A kept one may have been closed (uvicorn does so even
        # after an unhandled error), and then it is unknown whether the server read the call.
        is_alone = not call.request_id and call.method != "GET"
        if is_alone:
            headers["connection"] = "close"
        body: Sequence[bytes | memoryview] = ()
        if call.body is not None:
            body = [msgspec.json.encode(call.body)] if isinstance(call.body, dict) else call.body
            headers["content-type"] = "application/json"
            headers["content-length"] = str(sum(map(len, body)))
        lines = [f"{call.method} {self._prefix}{call.path} HTTP/1.1", *(f"{name}: {headers[name]}" for name in headers)]
        if not all(map(str.isprintable, lines)):
            raise EngineRejected(f"{self.name}: {_what(call)} has a header that is not one line of text")
        connection = await connections.begin(["\r\n".join((*lines, "", "")).encode(), *body], on_new=is_alone)
        self.generations_sent += bool(call.request_id)
        return connection

    def _require_success(self, call: HttpCall, answer: HttpAnswer) -> HttpAnswer:
        if 200 <= answer.status < 300:
            return answer
        words = server_message(answer.content)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            words += f"; its key is taken from {ENGINE_KEY}, or from VARIABLE in URL#key=VARIABLE"
        raise error_for_status(answer.status, f"{self.name} answered {_what(call)} with {answer.status}: {words}")


class _NamedFailures(NamedTuple):  # each turn enters two: a generator costs three times as much
    server: str
    call: HttpCall

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        server, call = self
        match error:
            # First, because it is an `OSError`. `TimeoutError` is one too.
            case CannotConnect():
                raise EngineUnavailable(f"{server} cannot be reached: {error}") from error
            case TimeoutError():
                # A generation without an answer may have been sampled; any other call just was not served.
                lost = EngineConnectionLost if call.request_id else EngineUnavailable
                raise lost(f"{server} did not answer {_what(call)} within {call.deadline_s:.0f} s") from error
            case OSError():
                reason = f"{type(error).__name__} {error}".rstrip()
                raise EngineConnectionLost(f"{server}: the connection broke during {_what(call)}: {reason}") from error


def _what(call: HttpCall) -> str:
    request = f" of request {call.request_id}" if call.request_id else ""
    return f"{call.method} {call.path}{request}"
