"""One engine server over HTTP: JSON and event streams in, values or typed errors out.

    never reached, 429, 503             EngineUnavailable
    any other 4xx                       EngineRejected, with the server's words
    any other status                    EngineError, with the server's words
    connection broke after the request  EngineConnectionLost
    not UTF-8, not JSON, wrong shape    EngineReplyInvalid

Every call has a deadline and no POST is repeated: whether a generation may be asked for again is not decided
here; a GET that meets a connection which had been closed is sent again. Redirects are not followed, and proxies of
the environment are never used.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from harness.engines.remote.address import ENGINE_KEY, EngineAddress
from harness.engines.remote.event_stream import EventBuffer, LineTooLong
from harness.engines.remote.http_connection import CannotConnect, Connection, Connections, StaleConnection
from harness.engines.remote.http_errors import error_for_status, excerpt, server_message
from harness.errors import EngineConnectionLost, EngineRejected, EngineReplyInvalid, EngineUnavailable
from harness.types import Json

_T = TypeVar("_T")
_R = TypeVar("_R")

GATHER_S = 0.041
"""For so long the events of a stream gather for somebody who reads along: those of 50 tokens a second come in threes,
because that is a little more than two of their intervals, and wait 20 ms in the middle."""

_LARGE_BYTES = 200_000  # read in some milliseconds


class HttpAnswer(NamedTuple):
    """A complete HTTP answer."""

    status: int
    content: bytes


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request to the server, and how long the whole of it may take."""

    method: str
    path: str
    deadline_s: float
    body: Json | Sequence[bytes] | None = None
    """An object, or the parts of its JSON."""
    headers: Mapping[str, str] = field(default_factory=dict)
    request_id: str = ""
    """Of the generation it belongs to, for messages."""


class EngineClient:
    """The connections to one engine server; `open` and `close` belong to its owner.

    Args:
        url: `http://host:port`, with or without a path prefix; may name a key of its own (`EngineAddress`).
        engine: Name of the kind of engine, for messages.
        api_key: Sent as a bearer token when the server has no key of its own; empty takes that of the environment.
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
        """Stands for the time of this client."""
        self.generations_sent = 0
        """Requests that reached the server, as far as is known here, and had it sample."""
        self._connections: Connections | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._decoders: dict[type, msgspec.json.Decoder[Any]] = {}

    def open(self) -> None:
        """Make the connection pool; needs the running loop. The number of connections is not bounded here."""
        self._connections = Connections(self.url)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="engine-replies")

    async def close(self) -> None:
        """Close every connection; idempotent."""
        connections, self._connections = self._connections, None  # first: nobody asks over those being closed
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.shutdown(wait=False)
        if connections is not None:
            await connections.close()

    async def get(self, path: str, kind: type[_T], *, deadline_s: float) -> _T:
        """The decoded answer to a GET."""
        return await self.call(HttpCall("GET", path, deadline_s), kind)

    async def post(self, path: str, body: Json, *, deadline_s: float) -> HttpAnswer:
        """The successful answer to a POST whose content nobody needs to decode."""
        call = HttpCall("POST", path, deadline_s, body)
        return self._require_success(call, await self.ask(call))

    async def get_text(self, path: str, *, deadline_s: float) -> str:
        """The text of a successful answer to a GET."""
        call = HttpCall("GET", path, deadline_s)
        return self._require_success(call, await self.ask(call)).content.decode("utf-8", errors="replace")

    async def call(self, call: HttpCall, kind: type[_T]) -> _T:
        """The content of a successful answer as a `kind`; raises the `EngineError` of the table above."""
        return await self.call_for(call, kind, lambda value: value)

    async def call_for(self, call: HttpCall, kind: type[_T], read: Callable[[_T], _R]) -> _R:
        """The content of a successful answer, through `read`; a large one is read off the event loop."""
        content = self._require_success(call, await self.ask(call)).content
        return await self.apart(len(content), lambda: read(self.decode(call, content, kind)))

    async def apart(self, size_bytes: int, work: Callable[[], _R]) -> _R:
        """Do `work` on a reply of that size and return its result; off the event loop when it is large."""
        if size_bytes <= _LARGE_BYTES or self._reader is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._reader, work)

    async def ask(self, call: HttpCall) -> HttpAnswer:
        """The answer, whatever its status."""
        connections = self._require_open()
        with self._name_failures(call):
            async with asyncio.timeout(call.deadline_s):
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
        """The payloads of the events of a stream, as they come; leaving early closes the connection.

        The deadline bounds the whole stream, the time its reader takes included.
        """
        connections, buffer = self._require_open(), EventBuffer()
        deadline = asyncio.get_running_loop().time() + call.deadline_s
        with self._name_failures(call):
            async with asyncio.timeout_at(deadline):
                connection = await self._send(connections, call)
        try:
            while not buffer.is_done:
                with self._name_failures(call):
                    async with asyncio.timeout_at(deadline):
                        payloads = await self._read_events(call, connection, buffer, connection.read_some)
                if payloads:
                    yield payloads
        finally:
            connections.end(connection)

    async def gather_events(
        self, call: HttpCall, payloads: list[bytes], hear: Callable[[], Awaitable[None]], *, gather_s: float
    ) -> None:
        """Put the payloads of the events of a stream into `payloads`, of one that breaks those that have come.

        `hear` is awaited when the first has come, and from then on `gather_s` behind the first of the next, for another
        megabyte, and for the end. The deadline of the call bounds that, too.
        """
        connections, buffer = self._require_open(), EventBuffer()
        with self._name_failures(call):
            async with asyncio.timeout(call.deadline_s):
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
        self, call: HttpCall, connection: Connection, buffer: EventBuffer, read: Callable[[], Awaitable[bytes]]
    ) -> list[bytes]:
        """The payloads in what `read` gets next of a stream's answer."""
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
        """`content` as a `kind`; raises `EngineReplyInvalid` when it is something else."""
        try:
            # The decoder skips fields that `kind` does not have without looking at their bytes.
            content.decode("utf-8")
            decoder: msgspec.json.Decoder[_T] = self._decoders.get(kind) or msgspec.json.Decoder(kind)
            self._decoders[kind] = decoder
            return decoder.decode(content)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
            raise EngineReplyInvalid(
                f"{self.name}: expected another answer to {_what(call)}, got {excerpt(content)}"
                f" ({error}); check the version of the server"
            ) from error

    def _require_open(self) -> Connections:
        if self._connections is None:
            raise EngineUnavailable(f"{self.name} is not connected; use the provider inside `async with`")
        return self._connections

    async def _send(self, connections: Connections, call: HttpCall) -> Connection:
        """The connection over which the call has left."""
        headers = {**self._headers, **call.headers}
        # What changes something has a connection of its own: a kept one may have been closed, by uvicorn even after an
        # unhandled error, and nobody could tell whether the call was read. A GET that meets a closed one is sent again.
        is_alone = not call.request_id and call.method != "GET"
        if is_alone:
            headers["connection"] = "close"
        body: Sequence[bytes] = ()
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

    @contextmanager
    def _name_failures(self, call: HttpCall) -> Iterator[None]:
        """Name what goes wrong on the wire in the block, which has the deadline of the call."""
        try:
            yield
        except CannotConnect as error:
            raise EngineUnavailable(f"{self.name} cannot be reached: {error}") from error
        except TimeoutError as error:
            # A generation that got no answer may have been sampled; every other call just was not served.
            kind = EngineConnectionLost if call.request_id else EngineUnavailable
            raise kind(f"{self.name} did not answer {_what(call)} within {call.deadline_s:.0f} s") from error
        except OSError as error:
            reason = f"{type(error).__name__} {error}".rstrip()
            raise EngineConnectionLost(f"{self.name}: the connection broke during {_what(call)}: {reason}") from error

    def _require_success(self, call: HttpCall, answer: HttpAnswer) -> HttpAnswer:
        if 200 <= answer.status < 300:
            return answer
        words = server_message(answer.content)
        if answer.status == HTTPStatus.UNAUTHORIZED:
            words += f"; its key is taken from {ENGINE_KEY}, or from VARIABLE in URL#key=VARIABLE"
        raise error_for_status(answer.status, f"{self.name} answered {_what(call)} with {answer.status}: {words}")


def _what(call: HttpCall) -> str:
    request = f" of request {call.request_id}" if call.request_id else ""
    return f"{call.method} {call.path}{request}"
