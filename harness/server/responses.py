"""Errors and values as HTTP answers."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response

from harness.dialects.openai_chat import error_body
from harness.errors import GateClosed, HarnessError, TurnRefused

_encoder = msgspec.json.Encoder()


def json_response(value: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def error_response(error: HarnessError) -> Response:
    """The answer for `error`, in the form OpenAI clients parse.

    A refused turn carries `x-should-retry: false`, a closed gate `retry-after`.
    """
    headers: dict[str, str] = {}
    if isinstance(error, GateClosed):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, TurnRefused) or not error.retryable:
        headers["x-should-retry"] = "false"
    return json_response(error_body(error), error.status, headers)
