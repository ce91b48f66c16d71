"""One request to a running server. A mistyped address fails within seconds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from harness.client.session_server import SessionServerClient

REACH_S = 5.0
"""Time for a server to answer at all, in case of a mistyped address."""

_T = TypeVar("_T")


def ask_server(server: str, admin_token: str | None, question: "Callable[[SessionServerClient], Awaitable[_T]]") -> _T:
    """Return the server's answer. Raises `ScenarioError` for a bad address, `SessionServerError`."""
    from harness.client.connections import SessionServerAddress, server_url
    from harness.client.session_server import SessionServerClient

    address = SessionServerAddress(server_url(server), admin_token)

    async def ask() -> _T:
        async with SessionServerClient(address) as client:
            await client.describe(deadline_s=REACH_S)
            return await question(client)

    return asyncio.run(ask())
