"""Connections to one session server, with deadlines and typed errors.

Requests are never repeated here. Each kind has its own connections: a shut gate holds hundreds of creations, while a
late renewal loses a hold.
"""

import asyncio
import ssl
from functools import cache
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

# aiohttp: httpx's pool scans all requests for each one. 256 rollouts ending at once took it 23 s.
import aiohttp
import msgspec

from harness.credentials import has_userinfo
from harness.errors import ScenarioError, SessionServerError
from harness.types import Json

_T = TypeVar("_T")

_KEEP_ALIVE_S = 4.0
_READ_BUFFER_BYTES = 1 << 20
_GATEWAY_STATUSES = frozenset({502, 503, 504})
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
NOT_DECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions raised when a response cannot be decoded."""


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
"""Verbs of the gate."""


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
    """Connections to the server at `address`; safe for concurrent use.

    `silence_s` limits a server that need not wait.
    """

    def __init__(self, address: SessionServerAddress, *, silence_s: float) -> None:
        self._url = address.url.rstrip("/")
        self._headers = {"authorization": f"Bearer {address.admin_token}"} if address.admin_token else {}
        self._silence_s = silence_s
        self._rooms: dict[ConnectionRoom, aiohttp.ClientSession] = {}
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        rooms, self._rooms = self._rooms, {}
        for room in rooms.values():
            await room.close()

    async def ask(
        self, room: ConnectionRoom, method: str, path: str, body: Json | None = None, *, timeout_s: float | None
    ) -> bytes:
        """Send one request and return its content. Raises `SessionServerError`.

        `timeout_s` includes connecting; None if the caller bounds it.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._silence_s, sock_read=None if room.waits else self._silence_s
        )
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._room(room).request(
                    method, f"{self._url}{path}", json=body, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                answer = await response.read()
        except _NEVER_SENT as error:
            why = getattr(error, "os_error", error)
            raise SessionServerError(
                f"{method} {path}: {self._url} cannot be reached: {why}; is the server running?",
                was_refused=True,
                retryable=True,
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise SessionServerError(
                f"{method} {path}: {type(error).__name__} {error}".rstrip(), retryable=True
            ) from error
        if not response.ok:
            raise _error_of(method, path, response, answer)
        return answer

    def _room(self, room: ConnectionRoom) -> aiohttp.ClientSession:
        if self._is_closed:
            raise SessionServerError(f"the client of {self._url} has been closed", code="closed", was_refused=True)
        if room not in self._rooms:
            tls = _tls_context() if self._url.startswith("https") else True
            self._rooms[room] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=room.connections, keepalive_timeout=_KEEP_ALIVE_S, ssl=tls),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                read_bufsize=_READ_BUFFER_BYTES,
                trust_env=False,
            )
        return self._rooms[room]


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the context of all clients: loading the certificates takes longer than a call."""
    import httpx  # whose certificates count; sooner, it would delay every start

    return httpx.create_ssl_context(trust_env=False)


def decode(content: bytes, kind: type[_T]) -> _T:
    """Decode a JSON answer as `kind`. Raises `SessionServerError`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except NOT_DECODABLE as error:
        raise SessionServerError(f"unexpected answer: {error}", code="invalid_answer") from error


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorDetail


def _error_of(method: str, path: str, response: aiohttp.ClientResponse, content: bytes) -> SessionServerError:
    try:
        detail = msgspec.json.decode(content, type=_ErrorAnswer).error
    except NOT_DECODABLE:
        detail = _ErrorDetail(message=response.reason or "")
    after = response.headers.get("retry-after", "")
    return SessionServerError(
        f"{method} {path}: {response.status} {detail.message}".rstrip(),
        status=response.status,
        code=detail.code or "unknown",
        was_refused=response.status == 503,
        retryable=response.status in _GATEWAY_STATUSES,
        retry_after_s=float(after) if after.isdecimal() else 0.0,  # it may be a date
    )
