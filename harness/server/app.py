"""The routes of a session server.

Handlers translate: HTTP in, a call, HTTP out. Those of sessions are in `session_routes`, those of agents in
`model_calls`; the gate, weight updates and the server itself are here. `access` says who may ask: a route without
`admin` around it is not for operators alone. Every answer, to unknown routes too, is JSON.
"""

import secrets
from functools import partial
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import harness
from harness.engines.base import is_on_prompt_scale
from harness.engines.identity import programs_of, serving_identity
from harness.errors import EngineUnavailable, ServerStopping, StoreError, WeightsUnsettled
from harness.machine.log import get_logger
from harness.server.http.access import for_operators, is_operator
from harness.server.http.connection import ClientConnection
from harness.server.http.queries import parse_since
from harness.server.http.responses import ErrorAnswers, json_response
from harness.server.http.wire import parse_expected, parse_hold, parse_release, parse_renewal, read_body
from harness.server.left_engines import LeftEngines, wake_engine
from harness.server.live_version import check_weights
from harness.server.model_calls import ModelCalls
from harness.server.registry import SessionRegistry
from harness.server.session_routes import SessionRoutes
from harness.server.sweep import Sweep, parse_sweep
from harness.server.turns import TurnService
from harness.sessions.gate import GateReport, GateState, HoldKind, HoldReport, Work
from harness.sessions.weights.weight_update import SweepReport, SweepRequest
from harness.telemetry.metrics import CONTENT_TYPE

log = get_logger(__name__)


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
            is_comparable=lambda turn: is_on_prompt_scale(turns.engine.capabilities.logprob_scale, turn.params),
            idle_ttl_s=turns.settings.idle_ttl_s,
            idle_page_out_s=turns.settings.idle_page_out_s,
            shard=turns.settings.shard,
            tracer=turns.tracer,
        )
        self.gatekeeper = turns.gatekeeper
        self.callers = turns.callers
        self.left_engines = LeftEngines(turns.gatekeeper, partial(wake_engine, turns.engine))
        self._turns = turns
        self._metrics = turns.metrics
        self.errors = ErrorAnswers(turns.metrics, turns.settings)
        self._last_sweep: SweepReport | None = None
        self._start = secrets.token_hex(8)

    def app(self) -> Starlette:
        """The ASGI application."""
        admin = partial(for_operators, admin_token=self.settings.admin_token)
        app = Starlette(
            routes=[
                *ModelCalls(self._turns, self.sessions, self.errors).routes(),
                Route("/sessions/drain", admin(partial(self._shut, HoldKind.DRAIN)), methods=["POST"]),
                Route("/sessions/pause", admin(partial(self._shut, HoldKind.PAUSE)), methods=["POST"]),
                Route("/sessions/renew", admin(self._renew), methods=["POST"]),
                Route("/sessions/resume", admin(self._resume), methods=["POST"]),
                Route("/sessions/gate", admin(self._gate), methods=["GET"]),
                Route("/sessions/holds", admin(self._hold_times), methods=["GET"]),
                Route("/sessions/sweep", admin(self._sweep), methods=["POST"]),
                Route("/sessions/sweep", admin(self._sweep_progress), methods=["GET"]),
                Route("/sessions/weights", admin(self._weights), methods=["POST"]),
                Route("/sessions/server", admin(self._describe), methods=["GET"]),
                *SessionRoutes(self._turns, self.sessions).routes(),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", admin(self._render_metrics), methods=["GET"]),
            ],
            exception_handlers=self.errors.by_type(),
        )
        app.router.redirect_slashes = False  # agents get an answer they can parse, not a redirect
        return app

    # Gate

    async def _shut(self, kind: HoldKind, request: Request) -> Response:
        wanted = parse_hold(await read_body(request, self.settings.limits))
        epoch = self.gatekeeper.gate.epoch
        hold = self.gatekeeper.place(wanted, kind)
        changed = self.gatekeeper.gate.epoch != epoch
        closed = await self.sessions.drain() if kind is HoldKind.DRAIN else 0
        await self.gatekeeper.keep(hold)
        if kind is HoldKind.DRAIN:
            log.info("gate_draining", changed=changed, sessions_closed=closed)
        return json_response(self._report_gate(changed=changed, sessions_closed=closed))

    async def _renew(self, request: Request) -> Response:
        hold = self.gatekeeper.renew(parse_renewal(await read_body(request, self.settings.limits)))
        await self.gatekeeper.keep(hold)
        return json_response(self._report_gate())

    async def _resume(self, request: Request) -> Response:
        wanted = parse_release(await read_body(request, self.settings.limits))
        released, epoch = self.gatekeeper.held, self.gatekeeper.gate.epoch
        await self.gatekeeper.release(wanted)
        changed = self.gatekeeper.gate.epoch != epoch
        is_open = self.gatekeeper.gate.state is GateState.OPEN
        return json_response(self._report_gate(changed=changed, released=released if changed and is_open else 0))

    async def _gate(self, request: Request) -> Response:
        del request
        return json_response(self._report_gate())

    async def _hold_times(self, request: Request) -> Response:
        return json_response(self.gatekeeper.report_times(parse_since(request.query_params)))

    def _report_gate(self, *, changed: bool = False, sessions_closed: int = 0, released: int = 0) -> GateReport:
        gate, now = self.gatekeeper.gate, self.gatekeeper.lease_clock()
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

    async def live_version(self) -> int | None:
        """The policy version that an engine which is ready to score would score by, asked now; None while none is."""
        await self._turns.live.look()
        is_paused = (await self._turns.engine.health()).paused
        return None if is_paused or self._turns.live.is_unsettled else self._turns.live.version

    async def sweep(self, asked: SweepRequest) -> SweepReport:
        """Score what waits for the live version. Raises `MalformedRequest` when that is not the one asked for."""
        sweep = Sweep(self._turns.engine, self._turns.live, self._turns.store, self.sessions, asked)
        self._last_sweep = sweep.report
        report = await sweep.run()
        self._metrics.sweep_ended(report.tokens_settled, report.tokens_left)
        return report

    async def _sweep(self, request: Request) -> Response:
        asked = parse_sweep(await read_body(request, self.settings.limits))
        async with self.callers.attend(ClientConnection.of(request)):
            return json_response(await self.sweep(asked))

    async def _sweep_progress(self, request: Request) -> Response:
        del request
        return json_response(self._last_sweep)

    async def _weights(self, request: Request) -> Response:
        expected = parse_expected(await read_body(request, self.settings.limits))
        return json_response(await check_weights(self._turns.engine, expected))

    # Operation

    async def _describe(self, request: Request) -> Response:
        del request
        engine = self._turns.engine
        serves = serving_identity(engine.capabilities, self._turns.chat_tokenizer)
        said = {"harness": harness.__version__, "start": self._start, "serves": serves, "engines": programs_of(engine)}
        said["tokenizer"] = str(self._turns.chat_tokenizer.tokenizer.folder or "")
        return json_response(said)

    async def _health(self, request: Request) -> Response:
        if not is_operator(request.headers, self.settings.admin_token):
            return json_response({"status": "alive"})
        engine = await self._turns.engine.health()
        store_problem = self._turns.store.problem
        troubles = (
            (ServerStopping.code, self.callers.is_stopping),
            (StoreError.code, store_problem is not None),
            (EngineUnavailable.code, not engine.ready),
            (WeightsUnsettled.code, self._turns.live.is_unsettled),
            ("engine_paused", self.left_engines.problem is not None),
        )
        status = next((code for code, is_so in troubles if is_so), "ok")
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
            "model_family": {"faults": list(self._turns.chat_tokenizer.describe().faults)},
        }
        return json_response(body, HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _render_metrics(self, request: Request) -> Response:
        del request
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)
