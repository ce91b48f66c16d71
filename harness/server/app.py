"""The routes of a session server.

Handlers translate: HTTP in, a call, HTTP out. Who may ask what is said in `access`: a route without `admin` around it
answers agents. Their model calls are `model_calls`. Every answer, unknown routes included, is JSON.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness.engines.base import EngineHealth
from harness.errors import EngineUnavailable, ServerStopping, StoreError, WeightsUnsettled
from harness.server.access import is_operator, require_admin
from harness.server.connection import ClientConnection
from harness.server.left_engines import LeftEngines
from harness.server.live_weights import parse_expected, settle_weights
from harness.server.model_calls import ModelCalls
from harness.server.reading import (
    asked_ids,
    collected_response,
    facts_response,
    record_response,
    samples_response,
    wants_binary,
)
from harness.server.registry import SessionRegistry
from harness.server.requests import read_body
from harness.server.responses import ErrorAnswers, json_response
from harness.server.sweep import Sweep, parse_sweep
from harness.server.turns import TurnService
from harness.server.wire import parse_end, parse_hold, parse_release, parse_renewal, parse_session_config
from harness.sessions.gate import GateReport, GateState, HoldKind, HoldReport, Work
from harness.sessions.record import session_summary
from harness.sessions.session import Session
from harness.sessions.weight_update import SweepReport
from harness.telemetry.metrics import CONTENT_TYPE

log = structlog.get_logger()

Handler = Callable[[Request], Awaitable[Response]]


class SessionServer:
    """The state behind the routes: sessions, gate, store, and the service that answers turns."""

    def __init__(self, turns: TurnService) -> None:
        self.settings = turns.settings
        self.sessions = SessionRegistry(
            turns.store,
            turns.metrics,
            turns.admitted,
            turns.clock,
            drain_grace_s=turns.settings.drain_grace_s,
            idle_ttl_s=turns.settings.idle_ttl_s,
        )
        self.gatekeeper = turns.gatekeeper
        self.callers = turns.callers
        self.left_engines = LeftEngines(turns.gatekeeper, turns.engine)
        self._turns = turns
        self._metrics = turns.metrics
        self._errors = ErrorAnswers(turns.metrics, turns.settings)
        self._last_sweep: SweepReport | None = None

    def app(self) -> Starlette:
        """The ASGI application."""
        admin = self._admin
        app = Starlette(
            routes=[
                *ModelCalls(self._turns, self.sessions, self._errors).routes(),
                Route("/sessions", admin(self._create), methods=["POST"]),
                Route("/sessions", admin(self._list), methods=["GET"]),
                Route("/sessions/drain", admin(self._drain), methods=["POST"]),
                Route("/sessions/pause", admin(self._pause), methods=["POST"]),
                Route("/sessions/renew", admin(self._renew), methods=["POST"]),
                Route("/sessions/resume", admin(self._resume), methods=["POST"]),
                Route("/sessions/gate", admin(self._gate), methods=["GET"]),
                Route("/sessions/sweep", admin(self._sweep), methods=["POST"]),
                Route("/sessions/sweep", admin(self._sweep_progress), methods=["GET"]),
                Route("/sessions/weights", admin(self._weights), methods=["POST"]),
                Route("/sessions/{id}/end", admin(self._end), methods=["POST"]),
                Route("/sessions/{id}", admin(self._delete), methods=["DELETE"]),
                Route("/sessions/{id}", self._record, methods=["GET"]),
                Route("/sessions/{id}/", self._alive, methods=["GET"]),
                Route("/sessions/{id}/v1", self._alive, methods=["GET"]),
                Route("/sessions/{id}/facts", admin(self._facts), methods=["GET"]),
                Route("/sessions/{id}/samples", admin(self._samples), methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", admin(self._render_metrics), methods=["GET"]),
            ],
            exception_handlers=self._errors.by_type(),
        )
        app.router.redirect_slashes = False  # agents get an answer they can parse, not a redirect
        return app

    # Sessions

    async def _create(self, request: Request) -> Response:
        config = parse_session_config(await self._body(request), self.settings.matchings, self.settings.limits)
        client = ClientConnection(request.receive, request.headers)
        async with client.watched():
            if config.resumes is not None:
                await self._turns.live.look()
            with self.callers.present(client):
                await self.gatekeeper.enter(Work.CREATE, client)
            # With no wait in between, a drain meets the gate or the session.
            session = await self.sessions.open(config, self._turns.live.version)
        base = self.settings.public_url or str(request.base_url)
        return json_response(
            {
                "session_id": session.session_id,
                "base_url": f"{base.rstrip('/')}/sessions/{session.session_id}",
                "api_key": session.api_key,
            }
        )

    async def _list(self, request: Request) -> Response:
        del request
        quarantined = [
            {"session_id": damaged.session_id, "reason": damaged.reason} for damaged in self.sessions.quarantined
        ]
        sessions = [session_summary(session) for session in self.sessions]
        return json_response({"sessions": sessions, "quarantined": quarantined})

    async def _record(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="application/json")
        require_admin(request.headers, self.settings.admin_token)
        ids = asked_ids(request)
        session_id, session = self._snapshot(request)
        return await asyncio.to_thread(record_response, session_id, session, ids)

    async def _facts(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        return facts_response(session_id, self.sessions.find(session_id))

    async def _samples(self, request: Request) -> Response:
        is_binary = wants_binary(request)
        await self._turns.live.look()
        live_version = self._turns.live.version
        session_id, session = self._snapshot(request)
        if is_binary:
            return await asyncio.to_thread(collected_response, session_id, session, live_version)
        return await asyncio.to_thread(samples_response, session, live_version)

    async def _end(self, request: Request) -> Response:
        asked = parse_end(await self._body(request))
        session_id = request.path_params["id"]
        session = self.sessions.find(session_id)
        if session is not None:
            try:
                async with self._dismissible(request):
                    await self.sessions.end(session, within_s=asked.within_s)
            finally:  # in force whatever became of the waiting: its calls that wait at the gate get their answer
                self.gatekeeper.look_again()
        return facts_response(session_id, session)

    async def _delete(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        for damaged in self.sessions.quarantined:
            if damaged.session_id == session_id:
                await self.sessions.give_up(damaged)
        session = self.sessions.find(session_id)
        if session is not None:
            try:
                await self.sessions.close(session)
            finally:  # in force even where the store failed: its calls that wait at the gate get their answer
                self.gatekeeper.look_again()
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # Whether anybody listens

    async def _alive(self, request: Request) -> Response:
        """The same for every id: what asks here only wants to know whether anybody listens."""
        return json_response({"session_id": request.path_params["id"], "object": "session"})

    # Gate

    async def _drain(self, request: Request) -> Response:
        wanted = parse_hold(await self._body(request))
        epoch = self.gatekeeper.gate.epoch
        hold = self.gatekeeper.place(wanted, HoldKind.DRAIN)
        changed = self.gatekeeper.gate.epoch != epoch
        closed = await self.sessions.drain()
        await self.gatekeeper.keep(hold)
        log.info("gate_draining", changed=changed, sessions_closed=closed)
        return json_response(self._report_gate(changed=changed, sessions_closed=closed))

    async def _pause(self, request: Request) -> Response:
        wanted = parse_hold(await self._body(request))
        epoch = self.gatekeeper.gate.epoch
        hold = self.gatekeeper.place(wanted, HoldKind.PAUSE)
        changed = self.gatekeeper.gate.epoch != epoch
        await self.gatekeeper.keep(hold)
        return json_response(self._report_gate(changed=changed))

    async def _renew(self, request: Request) -> Response:
        hold = self.gatekeeper.renew(parse_renewal(await self._body(request)))
        await self.gatekeeper.keep(hold)
        return json_response(self._report_gate())

    async def _resume(self, request: Request) -> Response:
        wanted = parse_release(await self._body(request))
        released, epoch = self.gatekeeper.held, self.gatekeeper.gate.epoch
        await self.gatekeeper.release(wanted)
        changed = self.gatekeeper.gate.epoch != epoch
        is_open = self.gatekeeper.gate.state is GateState.OPEN
        return json_response(self._report_gate(changed=changed, released=released if changed and is_open else 0))

    async def _gate(self, request: Request) -> Response:
        del request
        return json_response(self._report_gate())

    def _report_gate(self, *, changed: bool = False, sessions_closed: int = 0, released: int = 0) -> GateReport:
        gate, now = self.gatekeeper.gate, self.gatekeeper.clock()
        return GateReport(
            state=gate.state,
            epoch=gate.epoch,
            holds=tuple(
                HoldReport(hold.holder, hold.kind, hold.engines, round(hold.until - now, 3)) for hold in gate.holds
            ),
            held=self.gatekeeper.held,
            sessions=len(self.sessions),
            sessions_open=sum(session.is_open for session in self.sessions),
            turns_in_flight=sum(len(session.turns_in_flight) for session in self.sessions),
            turns_held=self.gatekeeper.held_by_work[Work.CONTINUATION],
            changed=changed,
            sessions_closed=sessions_closed,
            released=released,
        )

    # Weight updates

    async def _sweep(self, request: Request) -> Response:
        asked = parse_sweep(await self._body(request))
        sweep = Sweep(self._turns.engine, self._turns.live, self._turns.store, self.sessions, asked)
        self._last_sweep = sweep.report
        async with self._dismissible(request):
            report = await sweep.run()
        self._metrics.swept(report.tokens_settled, report.tokens_left)
        return json_response(report)

    async def _sweep_progress(self, request: Request) -> Response:
        del request
        return json_response(self._last_sweep)

    async def _weights(self, request: Request) -> Response:
        expected = parse_expected(await self._body(request))
        return json_response(await settle_weights(self._turns.engine, expected))

    # Operation

    async def _health(self, request: Request) -> Response:
        if not is_operator(request.headers, self.settings.admin_token):
            return json_response({"status": "alive"})
        engine = await self._turns.engine.health()
        store_problem = self._turns.store.problem
        status = self._status(engine)
        body = {
            "status": status,
            "gate": str(self.gatekeeper.gate.state),
            "engine": {
                "name": self._turns.engine.capabilities.engine,
                "ready": engine.ready,
                "paused": engine.paused,
                "running": engine.running,
                "waiting": engine.waiting,
                "detail": engine.detail,
                "left_paused": self.left_engines.problem or "",
                "weight_version": self._turns.engine.weight_version,
            },
            "store": {
                "ready": store_problem is None,
                "detail": store_problem or "",
                "quarantined": len(self.sessions.quarantined),
            },
        }
        return json_response(body, HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    def _status(self, engine: EngineHealth) -> str:
        """`ok`, or the code of the error that keeps turns from being served."""
        if self.callers.is_stopping:
            return ServerStopping.code
        if self._turns.store.problem:
            return StoreError.code
        if not engine.ready:
            return EngineUnavailable.code
        if self._turns.live.is_unsettled:
            return WeightsUnsettled.code
        return "engine_paused" if self.left_engines.problem else "ok"

    async def _render_metrics(self, request: Request) -> Response:
        del request
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    # What handlers share

    def _admin(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            require_admin(request.headers, self.settings.admin_token)
            return await handler(request)

        return checked

    def _snapshot(self, request: Request) -> tuple[str, Session | None]:
        """The id in the path, and a copy of its session for another thread; None when there is no such session."""
        session_id = request.path_params["id"]
        session = self.sessions.find(session_id)
        return session_id, None if session is None else session.snapshot()

    @asynccontextmanager
    async def _dismissible(self, request: Request) -> AsyncIterator[None]:
        """Work that takes a while, and ends with `ServerStopping` when the server does."""
        client = ClientConnection(request.receive, request.headers)
        with self.callers.present(client):
            async with client.patience():
                yield

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.settings.limits)
