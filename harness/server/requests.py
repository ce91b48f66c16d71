"""What every route may ask of a request: its body, within a limit, and the credential that it carries.

A credential is a bearer token or an `x-api-key`: clients of OpenAI send the one, clients of Anthropic the other. What a
body means is read elsewhere (`wire`, `dialects`).
"""

import secrets
from collections.abc import Mapping

from starlette.requests import Request

from harness.dialects.request_limits import RequestLimits
from harness.errors import BodyTooLarge, Unauthorized

_SHOWN = 20  # digits of a declared length


def credential(headers: Mapping[str, str]) -> str:
    """The bearer token or API key in `headers`, which have lower-case names; empty when there is none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def require_admin(headers: Mapping[str, str], admin_token: str | None) -> None:
    """Raises `Unauthorized` when an admin token is set and `headers` do not carry it."""
    if admin_token and not secrets.compare_digest(credential(headers).encode(), admin_token.encode()):
        raise Unauthorized("expected the admin token as `Authorization: Bearer ...`")


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """The request body. Raises `BodyTooLarge` as soon as it is known to be too long."""
    declared = request.headers.get("content-length", "")
    chunks: list[bytes] = []
    size_bytes = 0
    if _is_within(declared, limits.body_bytes):
        async for chunk in request.stream():
            chunks.append(chunk)
            size_bytes += len(chunk)
            if size_bytes > limits.body_bytes:
                break
        else:
            return b"".join(chunks)
    raise BodyTooLarge(
        f"body: expected at most {limits.body_bytes} bytes (the server's limit `body_bytes`),"
        f" got {declared[:_SHOWN] or f'{size_bytes} and more'}",
        limit="body_bytes",
    )


def _is_within(declared: str, most_bytes: int) -> bool:
    """Whether a body of the length that its header declares may be read; one that declares none is read up to there."""
    return not declared.isdecimal() or (len(declared) <= _SHOWN and int(declared) <= most_bytes)
