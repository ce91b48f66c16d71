"""Permissions of requests to a session server.

    open       any client: a constant liveness answer, without side effects
    session    the session's own key: its model calls, and the model's name
    operator   the admin token: everything else

A credential is a bearer token (OpenAI clients), an `x-api-key` (Anthropic clients) or an `x-goog-api-key` (Gemini
clients). Without an admin token every client may do everything. With one, a missing key gets 401, and a wrong one 404
even if the session exists. Every client measured stops on 404.
"""

import secrets
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from harness.credentials import is_same
from harness.errors import Unauthorized

Handler = Callable[[Request], Awaitable[Response]]

ADMIN_TOKEN_BYTES = 24


def new_admin_token() -> str:
    """Return a random admin token, safe in a header and a shell."""
    return secrets.token_urlsafe(ADMIN_TOKEN_BYTES)


def credential(headers: Mapping[str, str]) -> str:
    """Return the bearer token or API key in `headers` (lower-case names), or ""."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key") or headers.get("x-goog-api-key", "")


def is_operator(headers: Mapping[str, str], admin_token: str | None) -> bool:
    """Return True if the sender may do everything."""
    return not admin_token or is_same(credential(headers), admin_token)


def require_admin(headers: Mapping[str, str], admin_token: str | None) -> None:
    """Raise `Unauthorized` if `headers` lack the admin token."""
    if not is_operator(headers, admin_token):
        raise Unauthorized("expected the admin token as `Authorization: Bearer ...`")


def for_operators(handler: Handler, admin_token: str | None) -> Handler:
    """Refuse requests to `handler` without the admin token."""

    async def check(request: Request) -> Response:
        require_admin(request.headers, admin_token)
        return await handler(request)

    return check


def require_key(headers: Mapping[str, str]) -> str:
    """Return the key in `headers`. Raises `Unauthorized` without one."""
    key = credential(headers)
    if not key:
        raise Unauthorized(
            "expected the session's own key as `Authorization: Bearer ...`, `x-api-key` or `x-goog-api-key`:"
            " the api_key of POST /sessions, which agents find in OPENAI_API_KEY"
        )
    return key
