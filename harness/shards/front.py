"""The public address of several shards: the gate, weight updates, and one account of all.

    POST /sessions              to the shard with the fewest sessions; `base_url` names the shard's own address
    /sessions/{id}/...          what owners ask goes to the session's shard (`front_sessions`)
    the verbs of the gate       decided here; every shard is told, and the answer says what that touched
    sweep, weights, metrics,    every shard is asked, and the answers are one
    health, the list
    model calls                 421, with the address of the shard: no turn ever comes through a front

The gate is this process's own, with its holds in a store of its own. A verb is in force at the front at once, then
durable, then at every shard that answers within its deadline; the others are lines in `problems`, and are told again
until they answer. A shard that is being started is shut until it has been told.
"""

import secrets
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness.errors import EngineUnavailable, MalformedRequest, ServerStopping, ShardUnavailable, StoreError
from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper
from harness.server.http.access import for_operators, is_operator
from harness.server.http.connection import Callers
from harness.server.http.queries import parse_since
from harness.server.http.responses import ErrorAnswers, json_response
from harness.server.http.wire import parse_expected, parse_hold, parse_release, parse_renewal, read_body
from harness.server.left_engines import LeftEngines
from harness.server.settings import ServerSettings
from harness.server.sweep import parse_sweep
from harness.sessions.gate import GateReport, GateState, HoldKind, HoldReport
from harness.sessions.weights.weight_update import LiveWeights, SweepReport
from harness.shards.directory import ShardDirectory
from harness.shards.front_sessions import FrontSessions
from harness.shards.link import VERB_S, ShardLink
from harness.shards.reports import add_counts, merge_metrics, merge_sweeps, merge_weights
from harness.shards.shard import ENGINES_PATH
from harness.shards.shard_links import ShardLinks
from harness.telemetry.metrics import CONTENT_TYPE, ServerMetrics

_ENGINES_S = 8.0  # for engines to answer to their shards
_OVER_S = 15.0  # for the end of a sweep whose time is over

log = get_logger(__name__)


class Front:
    """The state behind the routes: the gate, and the links to the shards."""

    def __init__(
        self,
        links: ShardLinks,
        gatekeeper: Gatekeeper,
        directory: ShardDirectory,
        metrics: ServerMetrics,
        settings: ServerSettings,
    ) -> None:
        self.callers = Callers()
        self.errors = ErrorAnswers(metrics, settings)
        self.left_engines = LeftEngines(gatekeeper, self._continue_engines)
        self._links = links
        self._gatekeeper = gatekeeper
        self._directory = directory
        self._metrics = metrics
        self._settings = settings
        self._start = secrets.token_hex(8)

    def app(self) -> Starlette:
        """The ASGI application."""
        admin = partial(for_operators, admin_token=self._settings.admin_token)
        sessions = FrontSessions(self._links, self._gatekeeper, self.callers, self._settings)
        app = Starlette(
            routes=[
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
                *sessions.routes(),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", admin(self._render_metrics), methods=["GET"]),
            ],
            exception_handlers=self.errors.by_type(),
        )
        app.router.redirect_slashes = False
        return app

    # Gate

    async def _shut(self, kind: HoldKind, request: Request) -> Response:
        wanted = parse_hold(await read_body(request, self._settings.limits))
        epoch, closed = self._gatekeeper.gate.epoch, self._sessions_closed
        hold = self._gatekeeper.place(wanted, kind)
        changed = self._gatekeeper.gate.epoch != epoch
        if kind is HoldKind.DRAIN:
            self._directory.note_drain()
            self._gatekeeper.look_again()
        await self._gatekeeper.keep(hold)
        return json_response(await self._report_gate(changed=changed, closed_before=closed))

    async def _renew(self, request: Request) -> Response:
        hold = self._gatekeeper.renew(parse_renewal(await read_body(request, self._settings.limits)))
        await self._gatekeeper.keep(hold)
        return json_response(await self._report_gate())

    async def _resume(self, request: Request) -> Response:
        wanted = parse_release(await read_body(request, self._settings.limits))
        epoch, held = self._gatekeeper.gate.epoch, self._gatekeeper.held
        released = self._released
        await self._gatekeeper.release(wanted)
        changed = self._gatekeeper.gate.epoch != epoch
        is_open = self._gatekeeper.gate.state is GateState.OPEN
        before = released - held if changed and is_open else None
        return json_response(await self._report_gate(changed=changed, released_before=before))

    async def _gate(self, request: Request) -> Response:
        del request
        return json_response(await self._report_gate())

    async def _hold_times(self, request: Request) -> Response:
        return json_response(self._gatekeeper.report_times(parse_since(request.query_params)))

    @property
    def _sessions_closed(self) -> int:
        return sum(link.sessions_closed for link in self._links)

    @property
    def _released(self) -> int:
        return sum(link.released for link in self._links)

    async def _report_gate(
        self, *, changed: bool = False, closed_before: int | None = None, released_before: int | None = None
    ) -> GateReport:
        """How the gate stands, once every shard has been told, or had its time."""
        told = await self._links.ask(ShardLink.tell, VERB_S)
        gate, now = self._gatekeeper.gate, self._gatekeeper.lease_clock()
        counts = add_counts(told.answers.values())
        return GateReport(
            state=gate.state,
            epoch=gate.epoch,
            holds=tuple(
                HoldReport(hold.holder, hold.kind, hold.engines, round(hold.until - now, 3)) for hold in gate.holds
            ),
            held=self._gatekeeper.held + counts.held,
            sessions=counts.sessions,
            sessions_open=counts.sessions_open,
            turns_in_flight=counts.turns_in_flight,
            turns_held=counts.turns_held,
            changed=changed,
            sessions_closed=0 if closed_before is None else self._sessions_closed - closed_before,
            released=0 if released_before is None else self._released - released_before,
            problems=told.problems,
        )

    async def _continue_engines(self) -> None:
        """One shard is enough: they all have the same engines. Raises why none could."""

        async def wake(link: ShardLink) -> None:
            (await link.ask("POST", ENGINES_PATH)).require()

        _ = (await self._links.ask(wake, _ENGINES_S)).some

    # Weight updates

    async def _sweep(self, request: Request) -> Response:
        asked = parse_sweep(await read_body(request, self._settings.limits))
        share = msgspec.structs.replace(asked, concurrency=max(1, asked.concurrency // len(self._links)))
        body = msgspec.json.encode(share)
        refusals: list[Response] = []

        async def sweep(link: ShardLink) -> SweepReport:
            answer = await link.ask("POST", "/sessions/sweep", body)
            if answer.status == MalformedRequest.status:
                refusals.append(Response(answer.body, answer.status, media_type="application/json"))
            return answer.read(SweepReport)

        done = await self._links.ask(sweep, asked.budget_s + _OVER_S)
        if refusals:
            return refusals[0]
        return json_response(merge_sweeps(done.some, {ShardUnavailable.code: len(done.problems)}))

    async def _sweep_progress(self, request: Request) -> Response:
        del request

        async def look(link: ShardLink) -> SweepReport | None:
            return (await link.ask("GET", "/sessions/sweep")).read(SweepReport | None)  # type: ignore[arg-type]

        found = await self._links.ask(look, VERB_S)
        reports = [report for report in found.some if report is not None]
        return json_response(merge_sweeps(reports, {}) if reports else None)

    async def _weights(self, request: Request) -> Response:
        expected = msgspec.json.encode(parse_expected(await read_body(request, self._settings.limits)))

        async def ask(link: ShardLink) -> LiveWeights:
            return (await link.ask("POST", "/sessions/weights", expected)).read(LiveWeights)

        asked = await self._links.ask(ask, _ENGINES_S)
        return json_response(merge_weights(asked.some, asked.problems))

    # Operation

    async def _describe(self, request: Request) -> Response:
        del request

        async def ask(link: ShardLink) -> dict[str, Any]:
            return (await link.ask("GET", "/sessions/server")).read(dict[str, Any])

        said = (await self._links.ask(ask, VERB_S)).some[0]
        return json_response({**said, "start": self._start, "shards": [link.url for link in self._links]})

    async def _health(self, request: Request) -> Response:
        if not is_operator(request.headers, self._settings.admin_token):
            return json_response({"status": "alive"})

        async def ask(link: ShardLink) -> dict[str, Any]:
            answer = await link.ask("GET", "/health")
            return answer.read(dict[str, Any], also=HTTPStatus.SERVICE_UNAVAILABLE)

        asked = await self._links.ask(ask, VERB_S)
        said = [{"shard": number, **answer} for number, answer in asked.answers.items()]
        troubles = (
            (ServerStopping.code, self.callers.is_stopping),
            (ShardUnavailable.code, bool(asked.problems)),
            (StoreError.code, any(each["status"] == StoreError.code for each in said)),
            (EngineUnavailable.code, any(each["status"] == EngineUnavailable.code for each in said)),
            ("engine_paused", self.left_engines.problem is not None),
        )
        others = (each["status"] for each in said if each["status"] != "ok")
        status = next((code for code, is_so in troubles if is_so), next(others, "ok"))
        body = {
            "status": status,
            "gate": str(self._gatekeeper.gate.state),
            "shards": said,
            "problems": asked.problems,
            "left_paused": self.left_engines.problem or "",
        }
        return json_response(body, HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _render_metrics(self, request: Request) -> Response:
        del request

        async def ask(link: ShardLink) -> bytes:
            answer = await link.ask("GET", "/metrics")
            answer.require()
            return answer.body

        asked = await self._links.ask(ask, VERB_S)
        pages = {str(number): page for number, page in asked.answers.items()}
        return Response(merge_metrics({"front": self._metrics.render(), **pages}), media_type=CONTENT_TYPE)
