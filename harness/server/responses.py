"""Values and errors as HTTP answers.

Every answer is JSON, also to an error that no route foresaw: `ErrorAnswers` is where all of them end that a route lets
through, counted and in the log. What a model call's error means for its session is not decided here (`turns`).
"""

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from harness.dialects.openai_chat import error_body
from harness.errors import GateClosed, HarnessError, MethodNotAllowed, OverLimit, RouteNotFound, ServerBusy, TurnRefused
from harness.server.access import is_operator
from harness.server.unknown_routes import UnknownRoutes
from harness.telemetry.metrics import ServerMetrics

log = structlog.get_logger()

_encoder = msgspec.json.Encoder()


def json_response(value: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    """`value` as JSON."""
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def error_response(error: HarnessError, *, to_agent: bool) -> Response:
    """The answer for `error`, in the form OpenAI clients parse.

    A refused turn carries `x-should-retry: false`, a closed gate or a busy server `retry-after`. Agents read less than
    operators: see `HarnessError.message_to_agents`.
    """
    headers: dict[str, str] = {}
    if isinstance(error, GateClosed | ServerBusy):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, TurnRefused) or not error.retryable:
        headers["x-should-retry"] = "false"
    body = error_body(error)
    if to_agent:
        body["error"]["message"] = error.message_to_agents
    return json_response(body, error.status, headers)


class ErrorAnswers:
    """The answers of one server to errors, by their type."""

    def __init__(self, metrics: ServerMetrics, admin_token: str | None) -> None:
        self._metrics = metrics
        self._admin_token = admin_token
        self._unknown_routes = UnknownRoutes()

    def by_type(self) -> dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]]:
        """What answers which error, as Starlette wants to be told."""
        return {
            HarnessError: self.refusal,
            HTTPException: self._no_such_route,
            ClientDisconnect: self._nobody_reads,
            Exception: self._bug,
        }

    async def refusal(self, request: Request, error: HarnessError) -> Response:
        """The answer to an error of ours."""
        self._metrics.error_answered(error.code)
        if isinstance(error, OverLimit):
            self._metrics.over_limit(error.limit)
        log.info("request_refused", path=request.url.path, code=error.code, error=error.message)
        return error_response(error, to_agent=not is_operator(request.headers, self._admin_token))

    async def _no_such_route(self, request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        what = f"{method} {path[:200]}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            answer: HarnessError = MethodNotAllowed(f"{what}: this route has other methods")
        else:
            answer = RouteNotFound(f"{what}: no such route; model calls go to BASE_URL/v1/chat/completions")
        self._metrics.error_answered(answer.code)
        pattern = self._unknown_routes.note(method, path)
        if pattern is not None:
            log.warning(answer.code, route=pattern, hint="told once: an agent with another dialect or base URL?")
        return error_response(answer, to_agent=True)

    async def _nobody_reads(self, request: Request, error: ClientDisconnect) -> Response:
        """The client left while it was sending."""
        del request, error
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    async def _bug(self, request: Request, error: Exception) -> Response:
        log.error("request_failed", path=request.url.path, exc_info=error)
        self._metrics.error_answered(HarnessError.code)
        told = HarnessError(f"internal error ({type(error).__name__}); the server's log has it")
        return error_response(told, to_agent=False)
