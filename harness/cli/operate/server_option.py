"""One request to the server of `--server`."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from harness.rollouts.client.session_server import SessionServerClient

_T = TypeVar("_T")


def ask_named(server: str, admin_token: str | None, question: "Callable[[SessionServerClient], Awaitable[_T]]") -> _T:
    """Return the server's answer. Raises `ScenarioError` for a bad address, `SessionServerError`."""
    from harness.rollouts.client.connections import SessionServerAddress, server_url
    from harness.rollouts.client.session_server import ask_server

    return ask_server(SessionServerAddress(server_url(server), admin_token), question)
