"""Values and errors as HTTP responses.

Every response is JSON. All errors that leave a route pass through `ErrorAnswers`, which counts and logs them. The
server sets status and headers, and the route's dialect the form of the body.
"""

import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from harness.dialects.dialect import DIALECTS, AnswerStream, Dialect, dialect_of, name_dialect
from harness.errors import (
    GateClosed,
    HarnessError,
    MethodNotAllowed,
    OverLimit,
    RequestError,
    RouteNotFound,
    ServerBusy,
    SessionNotFound,
    TooMany,
    TurnRefused,
    UpgradeRefused,
)
from harness.machine.log import get_logger
from harness.server.http.access import is_operator
from harness.server.settings import ServerSettings
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.printable import shorten_secrets

log = get_logger(__name__)

MAX_PATTERNS = 64
"""Number of unknown route patterns to distinguish."""
OTHER = "other"

_LONGEST_PATH = 200  # characters
_LONGEST_PART = 100  # characters of a method, and of a path

_encoder = msgspec.json.Encoder()


def json_response(value: Any, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(_encoder.encode(value), status, headers, media_type="application/json")


def error_response(
    error: HarnessError, *, to_agent: bool, request_id: str = "", dialect: Dialect = DIALECTS[0]
) -> Response:
    """Build the response to `error` in the form of `dialect`; `request_id` finds it in the log.

    A refused turn has `x-should-retry: false`; a closed gate or a busy server has `retry-after`. Agents get less detail
    than operators (`HarnessError.message_to_agents`).
    """
    headers: dict[str, str] = {}
    if isinstance(error, GateClosed | ServerBusy | TooMany):
        headers["retry-after"] = str(error.retry_after_s)
    elif isinstance(error, TurnRefused) or not error.retryable:
        headers["x-should-retry"] = "false"
    message = error.message_to_agents if to_agent else error.message
    return json_response(dialect.error_body(error, message, request_id), error.status, headers)


class ErrorAnswers:
    """Error responses of one server, by type."""

    def __init__(self, metrics: ServerMetrics, settings: ServerSettings) -> None:
        self._metrics = metrics
        self._admin_token = settings.admin_token
        self._dialects = settings.dialects
        self._unknown_routes = UnknownRoutes()

    def by_type(self) -> dict[type[Exception], Callable[[Request, Any], Awaitable[Response]]]:
        """Return Starlette's exception handlers.

        Starlette calls the first three only until the response has begun; then a streamed answer ends itself
        (`end_stream`). The last is outermost, and its error is raised again for the web server, which cuts a connection
        whose response has begun.
        """
        return {
            HarnessError: self.refuse,
            HTTPException: self._refuse_route,
            ClientDisconnect: self._answer_nobody,
            Exception: self._answer_bug,
        }

    async def refuse(self, request: Request, error: HarnessError) -> Response:
        """Answer an error of the harness."""
        request_id = _new_id()
        self._note(request, error, request_id)
        to_agent = not is_operator(request.headers, self._admin_token)
        return error_response(error, to_agent=to_agent, request_id=request_id, dialect=self._dialect_of(request))

    def refuse_connection(self, error: RequestError) -> Response:
        """Answer a connection without a valid request, or a slow or oversized one."""
        self._count(error)
        request_id = _new_id()
        log.info("connection_refused", code=error.code, error=error.message, request_id=request_id)
        return error_response(error, to_agent=True, request_id=request_id)

    def end_stream(self, request: Request, stream: AnswerStream, request_id: str, error: HarnessError) -> bytes:
        """Return the end of a streamed answer that has begun."""
        self._note(request, error, request_id)
        to_agent = not is_operator(request.headers, self._admin_token)
        return stream.fail(error, error.message_to_agents if to_agent else error.message)

    def _count(self, error: HarnessError) -> None:
        self._metrics.errors.labels(error.code).inc()
        if isinstance(error, OverLimit):
            self._metrics.over_limit.labels(error.limit).inc()

    def _note(self, request: Request, error: HarnessError, request_id: str) -> None:
        self._count(error)
        # A message about the request quotes it, so it goes to the client but not into the log.
        is_quote = isinstance(error, RequestError | SessionNotFound)
        about = {"param": getattr(error, "param", None)} if is_quote else {"error": error.message}
        log.info("request_refused", path=_path_in_log(request), code=error.code, request_id=request_id, **about)

    def _dialect_of(self, request: Request) -> Dialect:
        return dialect_of(request.url.path, self._dialects)

    async def _refuse_route(self, request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path
        what = f"{method} {path[:200]}"
        answer: HarnessError
        if request.headers.get("upgrade", "").lower() == "websocket":
            answer = UpgradeRefused(f"{what}: WebSockets are not served; use HTTP, which also streams answers")
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            answer = MethodNotAllowed(f"{what}: this route does not allow the method")
        else:
            paths = " or ".join(f"BASE_URL{dialect.path}" for dialect in self._dialects)
            answer = RouteNotFound(f"{what}: no such route; model calls go to {paths}")
        self._metrics.errors.labels(answer.code).inc()
        # Clients try an upgrade first, and `harness ctl` probes every server for a router.
        is_expected = isinstance(answer, UpgradeRefused) or path == "/router"
        if not is_expected:
            self._metrics.unknown_routes.labels(name_dialect(path)).inc()
        pattern = None if is_expected else self._unknown_routes.note(method, path)
        if pattern is not None:
            hint = "reported once: does an agent use another dialect or base URL?"
            log.warning(answer.code, route=shorten_secrets(pattern), hint=hint)
        return error_response(answer, to_agent=True, request_id=_new_id(), dialect=self._dialect_of(request))

    async def _answer_nobody(self, request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    async def _answer_bug(self, request: Request, error: Exception) -> Response:
        request_id = _new_id()
        log.error("request_failed", path=_path_in_log(request), request_id=request_id, exc_info=error)
        self._metrics.errors.labels(HarnessError.code).inc()
        told = HarnessError(f"internal error ({type(error).__name__}); see the server's log")
        return error_response(told, to_agent=False, request_id=request_id, dialect=self._dialect_of(request))


def _new_id() -> str:
    return secrets.token_hex(16)


def _path_in_log(request: Request) -> str:
    return shorten_secrets(request.url.path[:_LONGEST_PATH])


class UnknownRoutes:
    """Requests for unknown routes, reported once per pattern.

    An agent with a wrong base URL requests the same few routes in every session, so patterns omit the session id.
    Clients choose paths, so patterns are limited.
    """

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, method: str, path: str) -> str | None:
        """Return the pattern of an unknown route on its first request."""
        first, *rest = path.strip("/").split("/")
        if first == "sessions" and rest:
            rest[0] = "{id}"
        pattern = f"{method[:_LONGEST_PART]} {'/'.join(('', first, *rest))[:_LONGEST_PART]}"
        if pattern not in self._seen and len(self._seen) >= MAX_PATTERNS:
            pattern = OTHER
        if pattern in self._seen:
            return None
        self._seen.add(pattern)
        return pattern
