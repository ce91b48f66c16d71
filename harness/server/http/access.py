"""The rights to ask things of a session server.

    open       anybody: a liveness answer, the same for everybody; it asks nobody, changes nothing and tells nothing
    session    the session's own key: its model calls, and the model's name
    operator   the admin token: everything else

A credential is a bearer token or an `x-api-key`: clients of OpenAI send the one, clients of Anthropic the other.
Without an admin token everybody at the address is an operator, and the path of a session is enough for its calls. With
one, a missing key is 401 and a wrong one 404: the same 404 whether or not there is such a session, which ends every
client that was measured.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from harness.credentials import is_same
from harness.errors import Unauthorized

Handler = Callable[[Request], Awaitable[Response]]
"""Answers the requests of a route."""

ADMIN_TOKEN_BYTES = 24


def new_admin_token() -> str:
    """An admin token that nobody can guess, fit for a header and a shell."""
    return secrets.token_urlsafe(ADMIN_TOKEN_BYTES)


def credential(headers: Mapping[str, str]) -> str:
    """The bearer token or API key in `headers`, which have lower-case names; empty when there is none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def is_operator(headers: Mapping[str, str], admin_token: str | None) -> bool:
    """Whether the sender of `headers` may do everything."""
    return not admin_token or is_same(credential(headers), admin_token)


def require_admin(headers: Mapping[str, str], admin_token: str | None) -> None:
    """Raises `Unauthorized` when an admin token is set and `headers` do not carry it."""
    if not is_operator(headers, admin_token):
        raise Unauthorized("expected the admin token as `Authorization: Bearer ...`")


def for_operators(handler: Handler, admin_token: str | None) -> Handler:
    """`handler`, with requests refused that do not carry the admin token where one is set."""

    async def check(request: Request) -> Response:
        require_admin(request.headers, admin_token)
        return await handler(request)

    return check


def require_key(headers: Mapping[str, str]) -> str:
    """The key that `headers` carry. Raises `Unauthorized` when there is none."""
    key = credential(headers)
    if not key:
        raise Unauthorized(
            "expected the session's own key as `Authorization: Bearer ...` or `x-api-key`:"
            " the api_key of POST /sessions, which agents find in OPENAI_API_KEY"
        )
    return key
