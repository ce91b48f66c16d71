"""A session server: operator requests for one process.

Handlers only translate between HTTP and calls. See also `routes` (the table and gate verbs), `session_routes` (owners),
`model_calls` (agents).
"""

import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from harness._version import __version__
from harness.engines.base import is_on_prompt_scale
from harness.engines.connect import programs_of, serving_identity
from harness.errors import EngineUnavailable, ServerStopping, StoreError, WeightsUnsettled
from harness.machine.log import get_logger
from harness.server.http.access import is_operator
from harness.server.http.connection import ClientConnection
from harness.server.http.responses import ErrorAnswers, json_response
from harness.server.http.wire import parse_expected, read_body, read_fields
from harness.server.left_engines import LeftEngines, wake_engine
from harness.server.live_version import check_weights
from harness.server.model_calls import ModelCalls
from harness.server.registry import SessionRegistry
from harness.server.routes import GateCounts, ServerApi
from harness.server.session_routes import OwnSessions
from harness.server.sweep import Sweep
from harness.server.teachers import Teachers
from harness.server.telemetry.metrics import CONTENT_TYPE
from harness.server.turns import TurnService
from harness.sessions.gate import Work
from harness.sessions.weights.weight_update import SweepReport, SweepRequest

log = get_logger(__name__)


class SessionServer(ServerApi):
    """State behind the routes: sessions, gate, store, and turn service."""

    def __init__(self, turns: TurnService) -> None:
        super().__init__(turns.gatekeeper, turns.settings, ErrorAnswers(turns.metrics, turns.settings))
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
        self.teachers = Teachers(turns, self.sessions)
        turns.admitted.on_recorded = self.teachers.turn_recorded
        self.callers = turns.callers
        self.left_engines = LeftEngines(turns.gatekeeper, partial(wake_engine, turns.engine))
        self._turns = turns
        self._metrics = turns.metrics
        self._last_sweep: SweepReport | None = None
        self._start = secrets.token_hex(8)

    def app(self) -> Starlette:
        calls = ModelCalls(self._turns, self.sessions, self.errors).routes()
        return self.build_app(OwnSessions(self._turns, self.sessions, self.teachers), before=calls, after=[])

    async def drain_sessions(self) -> Callable[[], int]:
        closed = await self.sessions.drain()
        return lambda: closed

    async def count_sessions(self) -> GateCounts:
        return GateCounts(
            sessions=len(self.sessions),
            sessions_open=sum(session.is_open for session in self.sessions),
            turns_in_flight=sum(len(session.turns_in_flight) for session in self.sessions),
            turns_held=self.gatekeeper.held_by_work[Work.CONTINUATION],
            held=self.gatekeeper.held,
        )

    # Weight updates

    async def live_version(self) -> int | None:
        """Return the policy version by which an engine would score now, or None if none is ready."""
        await self._turns.live.look()
        is_paused = (await self._turns.engine.health()).paused
        return None if is_paused or self._turns.live.is_unsettled else self._turns.live.version

    async def sweep(self, asked: SweepRequest) -> SweepReport:
        """Score tokens that wait for the live version. Raises `MalformedRequest` if `asked` has another one."""
        sweep = Sweep(self._turns.engine, self._turns.live, self._turns.store, self.sessions, asked)
        self._last_sweep = sweep.report
        report = await sweep.run()
        self._metrics.sweep_settled.inc(report.tokens_settled)
        self._metrics.sweep_left.inc(report.tokens_left)
        return report

    async def _start_sweep(self, request: Request) -> Response:
        asked = await read_fields(request, self.settings.limits, SweepRequest)
        with self.callers.attend(ClientConnection.of(request)):
            return json_response(await self.sweep(asked))

    async def _sweep_progress(self, request: Request) -> Response:
        return json_response(self._last_sweep)

    async def _weights(self, request: Request) -> Response:
        expected = parse_expected(await read_body(request, self.settings.limits))
        return json_response(await check_weights(self._turns.engine, expected))

    # Operation

    async def _describe(self, request: Request) -> Response:
        engine = self._turns.engine
        able = engine.capabilities
        said: dict[str, Any] = {"harness": __version__, "start": self._start, "engines": programs_of(engine)}
        said["serves"] = serving_identity(able, self._turns.chat_tokenizer)
        said["tokenizer"] = str(self._turns.chat_tokenizer.tokenizer.folder or "")
        said |= {"routed_experts": able.routed_experts, "max_mask_ids": able.max_mask_ids}
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
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)
