"""Options that name a server, and one request to it. A mistyped address fails within seconds."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from harness.rollouts.client.session_server import SessionServerClient

_REACH_S = 5.0
"""Time for a server to answer at all, in case of a mistyped address."""

Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="HARNESS_SERVER",
        metavar="URL",
        help="A session server, a front or a router.",
        show_default=False,
    ),
]
AdminToken = Annotated[
    str | None, typer.Option(envvar="HARNESS_ADMIN_TOKEN", help="That of --server.", show_default=False)
]

_T = TypeVar("_T")


def ask_server(server: str, admin_token: str | None, question: "Callable[[SessionServerClient], Awaitable[_T]]") -> _T:
    """Return the server's answer. Raises `ScenarioError` for a bad address, `SessionServerError`."""
    from harness.rollouts.client.connections import SessionServerAddress, server_url
    from harness.rollouts.client.session_server import SessionServerClient

    address = SessionServerAddress(server_url(server), admin_token)

    async def ask() -> _T:
        async with SessionServerClient(address) as client:
            await client.describe(deadline_s=_REACH_S)
            return await question(client)

    return asyncio.run(ask())
