"""Routes shared by a session server and a front.

Each route is a row here and a method of `SessionsApi` or `ServerApi`, so neither server can lack it. Routes without
`admin` are open to more than operators (`access`). Every answer is JSON, also for unknown routes. Model calls are not
included: only a server answers them (`model_calls`).
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.access import for_operators
from harness.server.http.queries import parse_since
from harness.server.http.responses import ErrorAnswers, json_response
from harness.server.http.wire import read_fields
from harness.server.settings import ServerSettings
from harness.sessions.gate import GateReport, GateState, HoldKind, HoldReport, HoldRequest, ReleaseRequest, RenewRequest

log = get_logger(__name__)

_Handler = Callable[[Request], Awaitable[Response]]


class SessionsApi:
    """Session requests of owners."""

    _create: _Handler
    _list_all: _Handler
    _times: _Handler
    _drain: _Handler
    _end: _Handler
    _delete: _Handler
    _record: _Handler
    _facts: _Handler
    _samples: _Handler
    _samples_for_miles: _Handler

    def routes(self, settings: ServerSettings) -> list[Route]:
        """Return the routes. `GET /sessions/{id}` checks the token itself, because its `HEAD` is open."""
        admin = partial(for_operators, admin_token=settings.admin_token)
        return [
            Route("/sessions", admin(self._create), methods=["POST"]),
            Route("/sessions", admin(self._list_all), methods=["GET"]),
            Route("/sessions/times", admin(self._times), methods=["GET"]),
            Route("/sessions/{id}/drain", admin(self._drain), methods=["POST"]),
            Route("/sessions/{id}/end", admin(self._end), methods=["POST"]),
            Route("/sessions/{id}", admin(self._delete), methods=["DELETE"]),
            Route("/sessions/{id}", self._record, methods=["GET"]),
            Route("/sessions/{id}/", _say_alive, methods=["GET"]),
            Route("/sessions/{id}/v1", _say_alive, methods=["GET"]),
            Route("/sessions/{id}/api/hello", _say_alive, methods=["GET"]),
            Route("/sessions/{id}/facts", admin(self._facts), methods=["GET"]),
            Route("/sessions/{id}/samples", admin(self._samples), methods=["GET"]),
            Route("/sessions/{id}/samples", admin(self._samples_for_miles), methods=["POST"]),
        ]


class GateCounts(NamedTuple):
    sessions: int
    sessions_open: int
    turns_in_flight: int
    turns_held: int
    held: int
    """Requests that wait at the gate."""
    problems: tuple[str, ...] = ()


class ServerApi(ABC):
    """Requests of operators: the gate, weights, and the server itself."""

    _start_sweep: _Handler
    _sweep_progress: _Handler
    _weights: _Handler
    _describe: _Handler
    _health: _Handler
    _render_metrics: _Handler

    def __init__(self, gatekeeper: Gatekeeper, settings: ServerSettings, errors: ErrorAnswers) -> None:
        self.gatekeeper = gatekeeper
        self.settings = settings
        self.errors = errors

    def build_app(self, sessions: SessionsApi, *, before: list[Route], after: list[Route]) -> Starlette:
        """Build the ASGI application, with model calls `before` or `after` all other routes."""
        admin = partial(for_operators, admin_token=self.settings.admin_token)
        app = Starlette(
            routes=[
                *before,
                Route("/sessions/drain", admin(partial(self._shut, HoldKind.DRAIN)), methods=["POST"]),
                Route("/sessions/pause", admin(partial(self._shut, HoldKind.PAUSE)), methods=["POST"]),
                Route("/sessions/renew", admin(self._renew), methods=["POST"]),
                Route("/sessions/resume", admin(self._resume), methods=["POST"]),
                Route("/sessions/gate", admin(self._gate), methods=["GET"]),
                Route("/sessions/holds", admin(self._hold_times), methods=["GET"]),
                Route("/sessions/sweep", admin(self._start_sweep), methods=["POST"]),
                Route("/sessions/sweep", admin(self._sweep_progress), methods=["GET"]),
                Route("/sessions/weights", admin(self._weights), methods=["POST"]),
                Route("/sessions/server", admin(self._describe), methods=["GET"]),
                *sessions.routes(self.settings),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", admin(self._render_metrics), methods=["GET"]),
                *after,
            ],
            exception_handlers=self.errors.by_type(),
        )
        app.router.redirect_slashes = False  # agents need a parsable answer, not a redirect
        return app

    # The gate

    async def _shut(self, kind: HoldKind, request: Request) -> Response:
        wanted = await read_fields(request, self.settings.limits, HoldRequest)
        epoch = self.gatekeeper.gate.epoch
        hold = self.gatekeeper.place(wanted, kind)
        changed = self.gatekeeper.gate.epoch != epoch
        count_closed = await self.drain_sessions() if kind is HoldKind.DRAIN else int
        await self.gatekeeper.keep(hold)
        report = await self._report_gate(changed=changed, count_closed=count_closed)
        if kind is HoldKind.DRAIN:
            log.info("gate_draining", changed=changed, sessions_closed=report.sessions_closed)
        return json_response(report)

    async def _renew(self, request: Request) -> Response:
        hold = self.gatekeeper.renew(await read_fields(request, self.settings.limits, RenewRequest))
        await self.gatekeeper.keep(hold)
        return json_response(await self._report_gate())

    async def _resume(self, request: Request) -> Response:
        wanted = await read_fields(request, self.settings.limits, ReleaseRequest)
        epoch, held, elsewhere = self.gatekeeper.gate.epoch, self.gatekeeper.held, self.released_elsewhere
        await self.gatekeeper.release(wanted)
        changed = self.gatekeeper.gate.epoch != epoch
        is_opened = changed and self.gatekeeper.gate.state is GateState.OPEN

        def count_released() -> int:
            return held + self.released_elsewhere - elsewhere if is_opened else 0

        return json_response(await self._report_gate(changed=changed, count_released=count_released))

    async def _gate(self, request: Request) -> Response:
        return json_response(await self._report_gate())

    async def _hold_times(self, request: Request) -> Response:
        holds = self.gatekeeper.times.since(parse_since(request.query_params))
        return json_response({"now": self.gatekeeper.clock(), "holds": holds})

    async def _report_gate(
        self, *, changed: bool = False, count_closed: Callable[[], int] = int, count_released: Callable[[], int] = int
    ) -> GateReport:
        counts = await self.count_sessions()  # before the two functions, `int` where there is nothing to count
        gate, now = self.gatekeeper.gate, self.gatekeeper.lease_clock()
        return GateReport(
            state=gate.state,
            epoch=gate.epoch,
            holds=tuple(
                HoldReport(hold.holder, hold.kind, hold.engines, round(hold.until - now, 3)) for hold in gate.holds
            ),
            changed=changed,
            sessions_closed=count_closed(),
            released=count_released(),
            **counts._asdict(),
        )

    @property
    def released_elsewhere(self) -> int:
        """Total of requests that other processes have released."""
        return 0

    @abstractmethod
    async def drain_sessions(self) -> Callable[[], int]:
        """Close every session to turns. Return a function that counts the closed sessions."""

    @abstractmethod
    async def count_sessions(self) -> GateCounts:
        """Count sessions and turns once the last change is in force behind the gate."""


async def _say_alive(request: Request) -> Response:
    # The same for every id: a client here only checks for a listening server.
    return json_response({"session_id": request.path_params["id"], "object": "session"})
