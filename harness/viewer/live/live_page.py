"""The live page of a session server, on its own loopback port.

    GET /SECRET/           the page, which begins empty
    GET /SECRET/changes    changes since the browser's last request

It has the operator's token, so any client that reaches it sees every session. A new secret at each start keeps out
other users, programs and sites. `Host` must be a loopback name (against DNS rebinding). Any other request gets only a
status. The token is sent to the session server only.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from harness.credentials import is_same
from harness.errors import RequestError
from harness.machine.asgi import HangingUpServer, answering, listening, stop_at_signals
from harness.machine.http_bounds import ConnectionBounds, ServerConnections
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import GREETING_S, Deadlines, SessionServerClient
from harness.tokens.tokenizer import Tokenizer
from harness.viewer.live.live_look import BrowserState, LiveLook
from harness.viewer.look import find_tokenizer, tokenizer_of
from harness.viewer.page.run_page import live_page
from server_patch.background import running

_SECRET_BYTES = 24
_HTTP_PORT = 80  # which a browser leaves out
_DEADLINES = Deadlines(attempt_s=10.0, read_s=20.0)
_BOUNDS = ConnectionBounds(
    connections=64, header_bytes=16_384, header_lines=64, header_s=10.0, body_s=10.0, write_s=30.0
)
# Most digits of a number in a query.
_DIGITS = 15
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",  # the page has the rest, which a policy of this kind may not
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class LivePage:
    """ASGI application of the live page of `source`, on this `port`, with `secret` in its address."""

    def __init__(self, look: LiveLook, source: str, port: int, secret: str) -> None:
        self._look = look
        self._page = live_page(source)
        shown = "" if port == _HTTP_PORT else f":{port}"
        self._hosts = {f"{name}{shown}" for name in ("127.0.0.1", "localhost")}
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (await self._answer(Request(scope)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return _nothing(HTTPStatus.FORBIDDEN)
        before, slash, rest = request.scope["path"].removeprefix("/").partition("/")
        if not (is_same(before, self._secret) and slash and request.method == "GET"):
            return _nothing(HTTPStatus.NOT_FOUND)
        if not rest:
            return Response(self._page, media_type="text/html", headers=_HEADERS)
        asked = _parse_asked(request.query_params) if rest == "changes" else None
        if asked is None:
            return _nothing(HTTPStatus.NOT_FOUND)
        told = msgspec.json.encode(await self._look.tell(asked))
        return Response(told, media_type="application/json", headers=_HEADERS)


class RunningPage(NamedTuple):
    url: str
    """Address of the page, with its secret."""
    hang_up: Callable[[], None]
    """Refuse further answers, so that the block ends quickly."""


@asynccontextmanager
async def serve_live(
    address: SessionServerAddress, tokenizer: Path | None = None, *, port: int = 0
) -> AsyncIterator[RunningPage]:
    """Serve the live page of `address` during the block; port 0 takes a free port.

    Texts use the tokenizer in `tokenizer`, else the server's. Raises `SessionServerError`, also if the server refuses
    the token, and `CannotListen`.
    """
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1", port))
        client = await stack.enter_async_context(SessionServerClient(address, deadlines=_DEADLINES))
        # A shard lacks this report and is refused here: users view its front.
        await client.gate().report(deadline_s=GREETING_S)
        missing: list[str] = []
        described = await client.describe(deadline_s=GREETING_S)
        folder = await asyncio.to_thread(find_tokenizer, tokenizer_of(described), tokenizer, missing)
        texts = None if folder is None else await asyncio.to_thread(Tokenizer.load, folder)
        bound, secret = listener.getsockname()[1], secrets.token_urlsafe(_SECRET_BYTES)
        app = LivePage(LiveLook(client, texts, missing=missing), address.url, bound, secret)
        connections = ServerConnections(_BOUNDS, _refuse)
        await stack.enter_async_context(running(connections.watch_for_ever()))
        embedded = await stack.enter_async_context(answering(HangingUpServer(app, connections), listener))
        yield RunningPage(f"http://127.0.0.1:{bound}/{secret}/", embedded.hang_up)


async def serve_live_until_told(
    address: SessionServerAddress, tokenizer: Path | None, *, port: int, started: Callable[[str], None]
) -> None:
    """Serve the live page until SIGINT or SIGTERM. Calls `started` with its address. A second signal is abrupt."""
    async with serve_live(address, tokenizer, port=port) as page:
        stop = stop_at_signals(page.hang_up)
        started(page.url)
        await stop.wait()


def _parse_asked(query: QueryParams) -> BrowserState | None:
    numbers = [query.get(name, "") for name in ("version", "texts", "record")]
    if not all(each.isascii() and each.isdigit() and len(each) <= _DIGITS for each in numbers):
        return None
    version, texts, record = map(int, numbers)
    return BrowserState(version, texts, query.get("open", ""), record)


def _refuse(error: RequestError) -> Response:
    return _nothing(error.status)


def _nothing(status: int) -> Response:
    return Response(status_code=status, headers={"cache-control": "no-store"})
