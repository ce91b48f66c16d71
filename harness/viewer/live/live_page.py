"""The live page of a session server, on a loopback port of its own.

    GET /SECRET/           the page, which begins empty
    GET /SECRET/changes    what has changed since a browser asked last

It holds the operator's token, so whoever can ask it sees every session. Its address has a secret that is another one
after every start, which keeps out the other users and programs of the machine and the pages of other sites. A name that
somebody else resolves to this machine (DNS rebinding) is no address of it: the `Host` has to be loopback's. Whatever
else is asked is answered with a status and nothing. The token is sent to the session server and to nobody else.
"""

import asyncio
import secrets
import signal
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

from harness.client.connections import SessionServerAddress
from harness.client.session_server import Deadlines, SessionServerClient
from harness.credentials import is_same
from harness.errors import RequestError
from harness.machine.asgi import HangingUpServer, answering, listening
from harness.machine.http_bounds import ConnectionBounds, ServerConnections
from harness.tokens.tokenizer import Tokenizer
from harness.viewer.live.live_look import Asked, LiveLook
from harness.viewer.look import find_tokenizer
from harness.viewer.look_at_server import tokenizer_of
from harness.viewer.page.run_page import live_page
from server_patch.background import running

_SECRET_BYTES = 24
_HTTP_PORT = 80  # which a browser leaves out
_GREETING_S = 5.0
_DEADLINES = Deadlines(attempt_s=10.0, read_s=20.0)
_BOUNDS = ConnectionBounds(
    connections=64, header_bytes=16_384, header_lines=64, header_s=10.0, body_s=10.0, write_s=30.0
)
_DIGITS = 15  # of a number that a browser counts
_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",  # the page has the rest, which a policy of this kind may not
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class LivePage:
    """The ASGI application.

    Args:
        look: At the session server.
        source: Its address, for the page.
        port: At which the application answers.
        secret: In the addresses of the page.
    """

    def __init__(self, look: LiveLook, source: str, port: int, secret: str) -> None:
        self._look = look
        self._page = live_page(source)
        shown = "" if port == _HTTP_PORT else f":{port}"
        self._hosts = {f"{name}{shown}" for name in ("127.0.0.1", "localhost")}
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
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
    """A live page that answers."""

    url: str
    """Of the page, with its secret."""
    hang_up: Callable[[], None]
    """Answer nobody any more; the block then ends quickly."""


@asynccontextmanager
async def serve_live(
    address: SessionServerAddress, tokenizer: Path | None = None, *, port: int = 0
) -> AsyncIterator[RunningPage]:
    """The live page of the server at `address` for the time of the block; port 0 takes a free one.

    Texts are of the tokenizer in the folder `tokenizer`, else of the one that the server names.

    Raises `SessionServerError` when the server does not answer at the beginning, or takes its token for none,
    `CannotListen`.
    """
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1", port))
        client = await stack.enter_async_context(SessionServerClient(address, deadlines=_DEADLINES))
        await client.gate().report(deadline_s=_GREETING_S)  # which a shard does not have: one looks at its front
        missing: list[str] = []
        described = await client.describe(deadline_s=_GREETING_S)
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
    """The live page until SIGINT or SIGTERM; calls `started` with its address as soon as it answers.

    A second signal ends what is still being answered.
    """
    stop = asyncio.Event()
    async with serve_live(address, tokenizer, port=port) as page:

        def end() -> None:
            if stop.is_set():
                page.hang_up()
            stop.set()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, end)
        started(page.url)
        await stop.wait()


def _parse_asked(query: QueryParams) -> Asked | None:
    """What a browser has and wants; None of what the page's script does not ask."""
    numbers = [query.get(name, "") for name in ("version", "texts", "record")]
    if not all(each.isascii() and each.isdigit() and len(each) <= _DIGITS for each in numbers):
        return None
    version, texts, record = map(int, numbers)
    return Asked(version, texts, query.get("open", ""), record)


def _refuse(error: RequestError) -> Response:
    return _nothing(error.status)


def _nothing(status: int) -> Response:
    return Response(status_code=status, headers={"cache-control": "no-store"})
