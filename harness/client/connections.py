"""The connections to one session server: one request at a time, its deadline, and the errors it ends with.

A request is never repeated here: whether a second one is safe, and when it comes, is for those to know who ask. The
server is reached directly, never through a proxy of the environment.

Requests share connections with those of their own kind only, and so never wait behind another kind: a gate that is shut
holds the creations of a whole step, and the end of 512 rollouts is 512 large answers. A hold that is renewed too late
is lost, and a deletion has the few seconds of a cancellation.

aiohttp, because the connection pool of httpx looks at every request for every request: the end of 256 rollouts at once
took it 23 s.
"""

import asyncio
from functools import cache, partial
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx
import msgspec

from harness.credentials import has_userinfo
from harness.errors import ScenarioError, SessionServerError
from harness.types import Json

_T = TypeVar("_T")

_KEEP_ALIVE_S = 4.0
_READ_BUFFER_BYTES = 1 << 20
_GATEWAY_STATUSES = frozenset({502, 503, 504})
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_tls_context = cache(partial(httpx.create_ssl_context, trust_env=False))
"""One for all clients: loading the certificates takes longer than a call."""
NOT_DECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""How decoding an answer fails."""


class Room(NamedTuple):
    """Requests of one kind, which share connections."""

    name: str
    connections: int
    """How many there may be; 0 is any number."""
    waits: bool = False
    """The server keeps its answer back until it has one: only the deadline of the request ends it."""


HELD = Room("held", 0, waits=True)
"""Creations and ends, which a shut gate or turns in flight hold; sweeps."""
BRIEF = Room("brief", 64)
"""Small answers, one or two for each rollout that ends."""
LARGE = Room("large", 64)
"""Samples."""
GATE = Room("gate", 0)
"""The verbs of the gate: few, and each opens or shuts it for everybody."""


class SessionServerAddress(msgspec.Struct, frozen=True):
    """Where a session server is, and what opens its admin verbs."""

    url: str
    admin_token: str | None = None

    def __repr__(self) -> str:
        return f"SessionServerAddress({self.url!r})"  # reports and errors show addresses, never tokens


def server_url(text: str) -> str:
    """The address `text` of a session server, without a slash at its end. Raises `ScenarioError` when it is none."""
    parts = urlsplit(text)
    if "@" in parts.netloc or has_userinfo(text):  # never shown
        raise ScenarioError("expected a session server's address without a user or a secret in it: give an admin token")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ScenarioError(f"expected a session server's address such as http://127.0.0.1:8000, got {text!r}")
    return text.rstrip("/")


class Connections:
    """To the server at `address`; safe for concurrent use, closed by their owner.

    Args:
        address: Of the session server.
        silence_s: How long connecting may take, and how long a server may say nothing where it need not wait.
    """

    def __init__(self, address: SessionServerAddress, *, silence_s: float) -> None:
        self._url = address.url.rstrip("/")
        self._headers = {"authorization": f"Bearer {address.admin_token}"} if address.admin_token else {}
        self._silence_s = silence_s
        self._rooms: dict[Room, aiohttp.ClientSession] = {}
        self._is_closed = False

    async def close(self) -> None:
        """Close every connection; what is asked afterwards fails."""
        self._is_closed = True
        rooms, self._rooms = self._rooms, {}
        for room in rooms.values():
            await room.close()

    async def ask(
        self, room: Room, method: str, path: str, body: Json | None = None, *, timeout_s: float | None
    ) -> bytes:
        """The content of a successful answer to one request. Raises `SessionServerError`.

        Args:
            room: The kind of request.
            method: Of HTTP.
            path: Below the address.
            body: Sent as JSON; nothing is when it is None.
            timeout_s: For all of it, the wait for a connection included; None when the caller bounds it.
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

    def _room(self, room: Room) -> aiohttp.ClientSession:
        if self._is_closed:
            raise SessionServerError(f"the client of {self._url} has been closed", code="closed", was_refused=True)
        if room not in self._rooms:
            self._rooms[room] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=room.connections, keepalive_timeout=_KEEP_ALIVE_S, ssl=_tls_context()
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                read_bufsize=_READ_BUFFER_BYTES,
                trust_env=False,
            )
        return self._rooms[room]


def decode(content: bytes, kind: type[_T]) -> _T:
    """The JSON answer `content` as a `kind`. Raises `SessionServerError` when it is none."""
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
