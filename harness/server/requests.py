"""The body of a request, within a limit. What it means is read elsewhere (`wire`, `dialects`)."""

from starlette.requests import Request

from harness.dialects.request_limits import RequestLimits
from harness.errors import BodyTooLarge

_SHOWN = 20  # digits of a declared length


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
