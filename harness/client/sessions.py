"""The control plane of a session, over HTTP: create, read, collect, delete.

Every call has a deadline and repeats what may succeed later. Creating is not idempotent, so it is repeated only when
the server said no (503) or was never reached; the other verbs are repeated after any failure of transport or gateway.
The server is reached directly, never through a proxy of the environment. aiohttp, because the connection pool of httpx
looks at every request for every request: the end of 256 rollouts at once took it 23 s.
"""

import asyncio
import ssl
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

import aiohttp
import httpx
import msgspec

from harness.errors import RunError, SessionServerError
from harness.samples.codec import sample_from_binary
from harness.types import Json, Sample, TurnStatus

_T = TypeVar("_T")
Futures = Collection[asyncio.Future[None]]

_CREATE = ("POST", "/sessions")
_AT_ONCE = 64  # requests whose answers may be large
_KEEP_ALIVE_S = 4.0
_READ_BUFFER_BYTES = 1 << 20
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_GATEWAY_STATUSES = frozenset({502, 503, 504})
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_NOT_DECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class SessionHandle(msgspec.Struct, frozen=True):
    """What `POST /sessions` gives out."""

    session_id: str
    base_url: str
    """Ends in `/sessions/<id>`; OpenAI clients append `/v1`."""
    api_key: str


class SessionFacts(msgspec.Struct, frozen=True):
    """What tells how a rollout ended, and whether its session has settled."""

    phase: str
    turns: dict[TurnStatus, int] = msgspec.field(default_factory=dict)
    """Recorded turns by their status."""
    refusals: dict[str, int] = msgspec.field(default_factory=dict)
    turns_in_flight: int = 0


class Collected(NamedTuple):
    """Everything a rollout is made of, as the server had it at one moment."""

    facts: SessionFacts
    session: Json
    """The record, without token columns."""
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each step around a session may take, repetitions included."""

    create_s: float = 120.0
    """Long enough for a paused or draining gate to open again; one request may use up all of it."""
    attempt_s: float = 30.0
    """What one request of the other steps may take before it is made again."""
    read_s: float = 60.0
    settle_s: float = 10.0
    """How long turns in flight, which are told to end with their agent, are waited for before the session is read."""
    delete_s: float = 5.0
    """Short: it runs while a rollout is being cancelled. A session that could not be deleted stays on the server."""


class SessionClient:
    """The connections to one session server; safe for concurrent use, closed by its owner."""

    def __init__(self, server_url: str, *, admin_token: str | None = None, deadlines: Deadlines | None = None) -> None:
        self._url = server_url.rstrip("/")
        self._headers = {"authorization": f"Bearer {admin_token}"} if admin_token else {}
        self._deadlines = deadlines or Deadlines()
        self._pools: dict[int, aiohttp.ClientSession] = {}
        """By how many connections they may have; 0 is any number."""
        self._is_closed = False

    async def close(self) -> None:
        """Close every connection; what is asked afterwards fails."""
        self._is_closed = True
        pools, self._pools = self._pools, {}
        for pool in pools.values():
            await pool.close()

    async def create(self, body: Json, *, give_up: Futures = ()) -> SessionHandle:
        """A session made from `body`, waiting for the gate when it is shut, until one of `give_up` is done.

        The server holds the request while its gate is paused, and a creation that got no answer cannot be made again:
        so it waits for its answer as long as it has time.
        """
        content = await self._call("POST", "/sessions", deadline_s=self._deadlines.create_s, body=body, give_up=give_up)
        return decoded(content, SessionHandle)

    async def facts(self, session_id: str) -> SessionFacts:
        """How the session stands; phase `unknown` when the server does not know it."""
        path = f"/sessions/{session_id}/facts"
        return decoded(await self._call("GET", path, deadline_s=self._deadlines.read_s), SessionFacts)

    async def collect(self, session_id: str) -> Collected:
        """Facts, record and samples of one moment; empty ones when the server does not know the session."""
        path = f"/sessions/{session_id}/samples?format=msgpack"
        return _collected(await self._call("GET", path, deadline_s=self._deadlines.read_s))

    async def end(self, session_id: str, *, within_s: float) -> SessionFacts:
        """The session accepts no further turn, and its turns in flight end; how it stands then, or after `within_s`."""
        path, deadline_s = f"/sessions/{session_id}/end", self._deadlines.read_s + within_s
        return decoded(await self._call("POST", path, deadline_s=deadline_s, body={"within_s": within_s}), SessionFacts)

    async def delete(self, session_id: str) -> None:
        """The session is gone from the server; idempotent."""
        await self._call("DELETE", f"/sessions/{session_id}", deadline_s=self._deadlines.delete_s)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        deadline_s: float,
        body: Json | None = None,
        give_up: Futures = (),
    ) -> bytes:
        """The content of a successful answer; raises the last `SessionServerError` when `deadline_s` is over."""
        deadline = time.monotonic() + deadline_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return await self.attempt(method, path, body, timeout_s=deadline - time.monotonic())
            except SessionServerError as error:
                wait_s = max(pause_s, error.retry_after_s)
                if not _may_repeat(method, path, error) or time.monotonic() + wait_s >= deadline:
                    raise
                await _pause(wait_s, give_up, error)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def attempt(self, method: str, path: str, body: Json | None = None, *, timeout_s: float) -> bytes:
        """The content of a successful answer to one request, never repeated; raises `SessionServerError`."""
        waits_on_server = (method, path) == _CREATE or path.endswith("/end")
        # A gate that is shut holds the creations of a whole step: nothing else may wait behind them.
        pool = self._pool(0 if waits_on_server else _AT_ONCE)
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=self._deadlines.attempt_s,
            sock_read=None if waits_on_server else self._deadlines.attempt_s,
        )
        try:
            async with (
                asyncio.timeout(timeout_s),
                pool.request(
                    method, f"{self._url}{path}", json=body, timeout=timeout, allow_redirects=False
                ) as response,
            ):
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _not_answered(method, path, error) from error
        if not response.ok:
            raise _answered_with_error(method, path, response, content)
        return content

    def _pool(self, most: int) -> aiohttp.ClientSession:
        if self._is_closed:
            raise SessionServerError(f"the client of {self._url} has been closed", code="closed", was_refused=True)
        if most not in self._pools:
            self._pools[most] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=most, keepalive_timeout=_KEEP_ALIVE_S, ssl=_tls_context()),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                read_bufsize=_READ_BUFFER_BYTES,
                trust_env=False,
            )
        return self._pools[most]


def decoded(content: bytes, kind: type[_T]) -> _T:
    """The JSON answer `content` as a `kind`. Raises `SessionServerError` when it is none."""
    try:
        return msgspec.json.decode(content, type=kind)
    except _NOT_DECODABLE as error:
        raise SessionServerError(f"unexpected answer: {error}", code="invalid_answer") from error


def _collected(content: bytes) -> Collected:
    try:
        answer = msgspec.msgpack.decode(content, type=_CollectedAnswer)
        samples = tuple(sample_from_binary(sample) for sample in answer.samples)
    except (*_NOT_DECODABLE, RunError) as error:
        raise SessionServerError(f"unexpected answer: {error}", code="invalid_answer") from error
    return Collected(answer.facts, decoded(answer.session, dict[str, Any]), samples)


@cache
def _tls_context() -> ssl.SSLContext:
    """One for all clients: loading the certificates takes longer than a call."""
    return httpx.create_ssl_context(trust_env=False)


class _CollectedAnswer(msgspec.Struct):
    facts: SessionFacts
    session: bytes
    """JSON."""
    samples: list[Json]


class _ErrorDetail(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorAnswer(msgspec.Struct):
    error: _ErrorDetail


async def _pause(seconds: float, give_up: Futures, error: SessionServerError) -> None:
    """Wait before the next attempt; raises `error` as soon as there shall be none."""
    never = asyncio.get_running_loop().create_future()
    await asyncio.wait({*give_up, never}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if any(future.done() for future in give_up):
        raise error


def _may_repeat(method: str, path: str, error: SessionServerError) -> bool:
    return error.was_refused if (method, path) == _CREATE else error.retryable


def _not_answered(method: str, path: str, error: Exception) -> SessionServerError:
    return SessionServerError(
        f"{method} {path}: {type(error).__name__} {error}".rstrip(),
        was_refused=isinstance(error, _NEVER_SENT),
        retryable=True,
    )


def _answered_with_error(
    method: str, path: str, response: aiohttp.ClientResponse, content: bytes
) -> SessionServerError:
    try:
        detail = msgspec.json.decode(content, type=_ErrorAnswer).error
    except _NOT_DECODABLE:
        detail = _ErrorDetail(message=response.reason or "")
    return SessionServerError(
        f"{method} {path}: {response.status} {detail.message}".rstrip(),
        status=response.status,
        code=detail.code or "unknown",
        was_refused=response.status == 503,
        retryable=response.status in _GATEWAY_STATUSES,
        retry_after_s=_retry_after_s(response.headers),
    )


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds of `Retry-After`; 0 when it is missing or a date."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
