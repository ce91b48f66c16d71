"""Pass requests to the gateway, and answers back, byte for byte and streamed, but for the repeat guard's signal.

A client that leaves cancels its request in the gateway and engine. Hop-by-hop headers (RFC 9110, 7.6.1) are dropped.
There is no deadline. The signal:

    /v1/chat/completions, /v1/completions
        one more key: `"harness": {"repeat_terminate_triggered": 1}`
    these and /generate, with `x-harness-wrapped: 1`
        `{"response": ..., "harness": {...}}`; a batch has a list of signals

Only routers with a proven guard add it, so 0 means watched and not ended. Streams pass untouched.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send
from yarl import URL

from server_patch.repeat_terminate.signals import MARK, SGLANG_MATCHED, VLLM_FINISH, signal

log = logging.getLogger(f"harness.{__name__}")

Header = tuple[bytes, bytes]

_OF_ONE_CONNECTION = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection"),
        *(b"te", b"trailer", b"transfer-encoding", b"upgrade"),
    }
)
_NOT_ASKED_FOR = _OF_ONE_CONNECTION | {b"host", b"expect"}  # our server has answered `expect` already
_NOT_ANSWERED = _OF_ONE_CONNECTION | {b"date"}  # our server writes its own
_ADDED_BY_AIOHTTP = ("accept", "accept-encoding", "content-type", "user-agent")


class Passthrough:
    """Forwarder of HTTP requests to `url`; `http` must not decompress. Answers have the signal if `is_guarded`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, is_guarded: Callable[[], bool]) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._is_guarded = is_guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        chunks: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        passing = asyncio.create_task(self._pass(scope, chunks, send))
        staying = asyncio.create_task(_listen(receive, chunks if _has_body(scope["headers"]) else None))
        try:
            await asyncio.wait((passing, staying), return_when=asyncio.FIRST_COMPLETED)
        finally:
            passing.cancel()
            staying.cancel()
            await asyncio.wait((passing, staying))
        if not passing.cancelled():
            passing.result()

    async def _pass(self, scope: Scope, chunks: "asyncio.Queue[bytes | None]", send: Send) -> None:
        has_begun = False
        try:
            async with self._http.request(
                scope["method"],
                self._target(scope),
                headers=_kept(scope["headers"], _NOT_ASKED_FOR),
                data=_body(chunks) if _has_body(scope["headers"]) else None,
                skip_auto_headers=_ADDED_BY_AIOHTTP,
                allow_redirects=False,
            ) as answer:
                has_begun = True
                amended = _amendment(scope) if _is_whole_json(answer) and self._is_guarded() else None
                await (_pass_back(answer, send) if amended is None else _amend_and_send(answer, amended, send))
        except (aiohttp.ClientError, OSError) as error:
            about = {"path": scope["path"], "error": f"{type(error).__name__} {error}"}
            log.warning("gateway_failed", extra=about)
            # An answer that has begun can only be cut: our server closes the connection of one that is incomplete.
            if not has_begun:
                await _say_unreachable(send, f"the gateway at {self._url} does not answer ({error})")

    def _target(self, scope: Scope) -> URL:
        path = scope.get("raw_path") or scope["path"].encode()
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        return URL(self._url + (path + query).decode("latin-1"), encoded=True)


async def _listen(receive: Receive, chunks: "asyncio.Queue[bytes | None] | None") -> None:
    while (message := await receive())["type"] == "http.request":
        if chunks is not None:
            await chunks.put(message.get("body", b""))
            if not message.get("more_body", False):
                await chunks.put(None)


async def _body(chunks: "asyncio.Queue[bytes | None]") -> AsyncIterator[bytes]:
    while (chunk := await chunks.get()) is not None:
        yield chunk


async def _pass_back(answer: aiohttp.ClientResponse, send: Send) -> None:
    headers = _kept_pairs(answer.raw_headers, _NOT_ANSWERED)
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    while chunk := await answer.content.readany():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body"})


async def _amend_and_send(answer: aiohttp.ClientResponse, amended: Callable[[bytes], bytes], send: Send) -> None:
    content = amended(await answer.read())
    headers = _kept_pairs(answer.raw_headers, _NOT_ANSWERED | {b"content-length"})
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": answer.status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": content})


def _is_whole_json(answer: aiohttp.ClientResponse) -> bool:
    return (
        answer.status == 200 and answer.content_type == "application/json" and "content-encoding" not in answer.headers
    )


async def _say_unreachable(send: Send, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "server_error", "code": "gateway_unreachable"}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 502, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _has_body(headers: Iterable[Header]) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in headers)


def _kept(headers: Iterable[Header], dropped: frozenset[bytes]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _kept_pairs(headers, dropped)]


def _kept_pairs(headers: Iterable[Header], dropped: frozenset[bytes]) -> list[Header]:
    return [(name, value) for name, value in headers if name.lower() not in dropped]


WRAPPED_HEADER = "x-harness-wrapped"

_CHOICES = ("/v1/chat/completions", "/v1/completions")
_TOKENS = "/generate"


def _amendment(scope: Scope) -> Callable[[bytes], bytes] | None:
    """Return the function that amends a whole answer."""
    if scope["method"] != "POST" or scope["path"] not in (*_CHOICES, _TOKENS):
        return None
    if Headers(scope=scope).get(WRAPPED_HEADER) == "1":
        return wrapped_bytes
    return with_signal_bytes if scope["path"] in _CHOICES else None


def with_signal_bytes(content: bytes) -> bytes:
    """Append the signal to an answer with choices, without re-encoding it."""
    answer = _decoded(content)
    if not isinstance(answer, dict) or not answer.get("choices"):
        return content
    return content.rstrip()[:-1] + b"," + json.dumps(signal(triggered=is_triggered(answer)))[1:].encode()


def wrapped_bytes(content: bytes) -> bytes:
    """Wrap an answer; a batch has a list of signals."""
    answer = _decoded(content)
    if isinstance(answer, list):
        signals: Any = [signal(triggered=is_triggered(each))["harness"] for each in answer]
    elif isinstance(answer, dict):
        signals = signal(triggered=is_triggered(answer))["harness"]
    else:
        return content
    return b'{"response":' + content + b',"harness":' + json.dumps(signals).encode() + b"}"


def is_triggered(answer: Any) -> bool:
    if not isinstance(answer, dict):
        return False
    if isinstance(choices := answer.get("choices"), list):
        return any(_ended_choice(choice) for choice in choices if isinstance(choice, dict))
    meta = answer.get("meta_info")
    finish = meta.get("finish_reason") if isinstance(meta, dict) else None
    return isinstance(finish, dict) and bool(finish.get(MARK))


def _ended_choice(choice: dict[str, Any]) -> bool:
    by_vllm = choice.get("finish_reason") == VLLM_FINISH and choice.get("stop_reason") == MARK
    return by_vllm or choice.get("matched_stop") == SGLANG_MATCHED


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return None
