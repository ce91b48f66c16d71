"""Connections to one session server, with deadlines and typed errors.

Requests are never repeated here. Each kind has its own connections: a shut gate holds hundreds of creations, while a
late renewal loses a hold.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from http.client import responses
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from harness.credentials import has_userinfo
from harness.decoding import read_json
from harness.engines.remote.http_connection import CannotConnect, EngineConnection, EngineConnections
from harness.errors import ScenarioError, SessionServerError
from harness.types import Json

_T = TypeVar("_T")

_GATEWAY_STATUSES = frozenset({502, 503, 504})
NOT_DECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ConnectionRoom(NamedTuple):
    name: str
    connections: int
    """0 is unlimited."""
    waits: bool = False
    """True if the server may hold its answer."""


HELD = ConnectionRoom("held", 0, waits=True)
"""Creations, ends and sweeps."""
BRIEF = ConnectionRoom("brief", 64)
LARGE = ConnectionRoom("large", 64)
GATE = ConnectionRoom("gate", 0)


class SessionServerAddress(msgspec.Struct, frozen=True):
    """Address of a session server, and its admin token."""

    url: str
    admin_token: str | None = None

    def __repr__(self) -> str:
        return f"SessionServerAddress({self.url!r})"  # reports and errors show addresses, never tokens


def server_url(text: str) -> str:
    """Return the address without a trailing slash. Raises `ScenarioError`."""
    parts = urlsplit(text)
    if "@" in parts.netloc or has_userinfo(text):  # never shown
        raise ScenarioError("expected a session server's address without a user or a secret in it: give an admin token")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ScenarioError(f"expected a session server's address such as http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/")


class Connections:
    """Connections to the server at `address` for concurrent use. `silence_s` limits a server that need not wait."""

    def __init__(self, address: SessionServerAddress, *, silence_s: float) -> None:
        parts = urlsplit(address.url)
        self._url, self._prefix = address.url.rstrip("/"), parts.path.rstrip("/")
        self._head = f"host: {parts.netloc}\r\naccept: */*\r\n"
        if address.admin_token:
            self._head += f"authorization: Bearer {address.admin_token}\r\n"
        self._silence_s = silence_s
        self._rooms: dict[ConnectionRoom, tuple[EngineConnections, asyncio.Semaphore | nullcontext[None]]] = {}
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        rooms, self._rooms = self._rooms, {}
        for connections, _ in rooms.values():
            await connections.close()

    async def ask(
        self, room: ConnectionRoom, method: str, path: str, body: Json | None = None, *, timeout_s: float | None
    ) -> bytes:
        """Send one request and return its content. Raises `SessionServerError`, also after `timeout_s`."""
        head, content = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}", b""
        if body is not None:
            content = msgspec.json.encode(body)
            head += "content-type: application/json\r\n"
        if method not in ("GET", "HEAD"):  # strict proxies refuse other requests without a length
            head += f"content-length: {len(content)}\r\n"
        try:
            async with asyncio.timeout(timeout_s), self._send(room, [f"{head}\r\n".encode(), content]) as connection:
                answer = await self._read(connection, None if room.waits else self._silence_s)
                if not 200 <= connection.status < 300:
                    raise _error_of(method, path, connection, answer)
                return answer
        except CannotConnect as error:
            raise SessionServerError(
                f"{method} {path}: {self._url} cannot be reached: {error}", was_refused=True, retryable=True
            ) from error
        except OSError as error:  # `TimeoutError` is one, too
            raise SessionServerError(
                f"{method} {path}: {type(error).__name__} {error}".rstrip(), retryable=True
            ) from error

    @asynccontextmanager
    async def _send(self, room: ConnectionRoom, parts: list[bytes]) -> AsyncIterator[EngineConnection]:
        connections, place = self._room(room)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(place)
            try:
                async with asyncio.timeout(self._silence_s):
                    connection = await connections.begin(parts)
            except TimeoutError as error:
                raise CannotConnect(f"no connection within {self._silence_s:g} s; is the server running?") from error
            stack.callback(connections.end, connection)
            yield connection

    async def _read(self, connection: EngineConnection, silence_s: float | None) -> bytes:
        pieces: list[bytes] = []
        while True:
            async with asyncio.timeout(silence_s):
                piece = await connection.read_some()
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)

    def _room(self, room: ConnectionRoom) -> tuple[EngineConnections, asyncio.Semaphore | nullcontext[None]]:
        if self._is_closed:
            raise SessionServerError(f"the client of {self._url} has been closed", code="closed", was_refused=True)
        if room not in self._rooms:
            place = asyncio.Semaphore(room.connections) if room.connections else nullcontext()
            self._rooms[room] = (EngineConnections(self._url), place)
        return self._rooms[room]


def decode(content: bytes, kind: type[_T]) -> _T:
    """Decode a JSON answer as `kind`. Raises `SessionServerError`."""
    try:
        return read_json(content, kind)
    except NOT_DECODABLE as error:
        raise SessionServerError(f"unexpected answer: {error}", code="invalid_answer") from error


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorDetail


def _error_of(method: str, path: str, connection: EngineConnection, content: bytes) -> SessionServerError:
    try:
        detail = read_json(content, _ErrorAnswer).error
    except NOT_DECODABLE:
        detail = _ErrorDetail(message=responses.get(connection.status, ""))
    after = connection.retry_after
    return SessionServerError(
        f"{method} {path}: {connection.status} {detail.message}".rstrip(),
        status=connection.status,
        code=detail.code or "unknown",
        was_refused=connection.status == 503,
        retryable=connection.status in _GATEWAY_STATUSES,
        retry_after_s=float(after) if after.isdigit() else 0.0,  # it may be a date
    )
