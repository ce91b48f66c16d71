"""What every route may ask of a request: its body, within a limit, and the credential that it carries.

A credential is a bearer token or an `x-api-key`: clients of OpenAI send the one, clients of Anthropic the other. What a
body means is read elsewhere (`wire`, `dialects`).
"""

import secrets
from collections.abc import Mapping

from starlette.requests import Request

from harness.errors import BodyTooLarge, Unauthorized


def credential(headers: Mapping[str, str]) -> str:
    """The bearer token or API key in `headers`, which have lower-case names; empty when there is none."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def require_admin(headers: Mapping[str, str], admin_token: str | None) -> None:
    """Raises `Unauthorized` when an admin token is set and `headers` do not carry it."""
    if admin_token and not secrets.compare_digest(credential(headers).encode(), admin_token.encode()):
        raise Unauthorized("expected the admin token as `Authorization: Bearer ...`")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The request body. Raises `BodyTooLarge` as soon as it is known to be longer than `most_bytes`."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not declared.isdecimal() or int(declared) <= most_bytes:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                break
        else:
            return bytes(body)
    raise BodyTooLarge(f"the request body is larger than {most_bytes} bytes")
