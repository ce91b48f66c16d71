"""The routes of a session server.

Handlers translate: HTTP in, a call, HTTP out. The path prefix `/sessions/<id>` is a session's identity; its own key
is accepted as an alternative on `/v1/...`. Creating, reading, draining and deleting are admin verbs. Every answer,
unknown routes included, is JSON.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus

import structlog
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness.dialects.openai_chat import Streaming
from harness.dialects.openai_stream import stream_body
from harness.errors import GateClosed, HarnessError, StoreError
from harness.samples.codec import sample_to_json
from harness.server.connection import ClientConnection
from harness.server.http_protocol import Delivery
from harness.server.live_weights import parse_expected, settle_weights
from harness.server.registry import SessionRegistry
from harness.server.requests import credential, read_body, require_admin
from harness.server.responses import ErrorAnswers, json_response
from harness.server.streaming import StreamedAnswer, StreamedTurn
from harness.server.sweep import Sweep, parse_sweep
from harness.server.turns import ModelCall, ServedTurn, TurnService
from harness.server.wire import parse_session_config
from harness.sessions.gate import GateState, Work
from harness.sessions.lifecycle import Phase
from harness.sessions.record import empty_record, session_record, session_summary
from harness.sessions.session import Session, SessionConfig
from harness.sessions.takeover import successor_config, turns_to_take_over
from harness.sessions.weight_update import SweepReport
from harness.telemetry.metrics import CONTENT_TYPE
from harness.types import Json

log = structlog.get_logger()

Handler = Callable[[Request], Awaitable[Response]]


class SessionServer:
    """The state behind the routes: sessions, gate, store, and the service that answers turns."""

    def __init__(self, turns: TurnService) -> None:
        self.settings = turns.settings
        self.sessions = SessionRegistry()
        self.gatekeeper = turns.gatekeeper
        self._turns = turns
        self._store = turns.store
        self._metrics = turns.metrics
        self._errors = ErrorAnswers(turns.metrics)
        self._last_sweep: SweepReport | None = None

    async def restore(self) -> int:
        """Take up the sessions a previous server left open (I9); returns how many."""
        sessions = await self._store.load()
        for session in sessions:
            session.doubt_deliveries()
        self.sessions.add(sessions)
        self._metrics.sessions_open(len(self.sessions))
        return len(sessions)

    def app(self) -> Starlette:
        """The ASGI application."""
        admin = self._admin
        app = Starlette(
            routes=[
                Route("/sessions/{id}/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/sessions", admin(self._create), methods=["POST"]),
                Route("/sessions", admin(self._list), methods=["GET"]),
                Route("/sessions/drain", admin(self._drain), methods=["POST"]),
                Route("/sessions/pause", admin(self._pause), methods=["POST"]),
                Route("/sessions/resume", admin(self._resume), methods=["POST"]),
                Route("/sessions/gate", admin(self._gate), methods=["GET"]),
                Route("/sessions/sweep", admin(self._sweep), methods=["POST"]),
                Route("/sessions/sweep", admin(self._sweep_progress), methods=["GET"]),
                Route("/sessions/weights", admin(self._weights), methods=["POST"]),
                Route("/sessions/{id}", admin(self._delete), methods=["DELETE"]),
                Route("/sessions/{id}", self._record, methods=["GET"]),
                Route("/sessions/{id}/", self._alive, methods=["GET"]),
                Route("/sessions/{id}/v1", self._alive, methods=["GET"]),
                Route("/sessions/{id}/samples", admin(self._samples), methods=["GET"]),
                Route("/sessions/{id}/v1/models", self._models, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._render_metrics, methods=["GET"]),
            ],
            exception_handlers=self._errors.by_type(),
        )
        app.router.redirect_slashes = False  # agents get an answer they can parse, not a redirect
        return app

    # Sessions

    async def _create(self, request: Request) -> Response:
        config = parse_session_config(await self._body(request), self.settings.matchings)
        client = ClientConnection(request.receive, request.headers)
        async with client.watched():
            await self.gatekeeper.enter(Work.CREATE, client)
            # With no wait in between, a drain meets the gate or the session.
            session = await self._opened(config)
        self._metrics.session_created()
        base = self.settings.public_url or str(request.base_url)
        return json_response(
            {
                "session_id": session.session_id,
                "base_url": f"{base.rstrip('/')}/sessions/{session.session_id}",
                "api_key": session.api_key,
            }
        )

    async def _opened(self, config: SessionConfig) -> Session:
        return await (
            self._keep_new(self.sessions.create(config)) if config.resumes is None else self._take_over(config)
        )

    async def _keep_new(self, session: Session) -> Session:
        """Hold `session` first and store it second, so that a drain which comes between closes it like the others."""
        self.sessions.add([session])
        self._metrics.sessions_open(len(self.sessions))
        try:
            await self._store.create(session)
        except StoreError:
            self._forget(session)
            raise
        if session.phase is not Phase.OPEN:
            await self._close(session)
            raise GateClosed("the server was drained while the session was created; ask again later")
        return session

    async def _take_over(self, config: SessionConfig) -> Session:
        """A new session with the turns of the one that it resumes, which is gone afterwards."""
        previous = self.sessions.get(config.resumes or "")
        session = self.sessions.create(successor_config(previous, config))
        self._forget(previous)  # at once: only one session may take over from it
        try:
            await self._keep_new(session)
            for turn in turns_to_take_over(previous.turns):
                session.restore(turn)
                await self._store.commit(session.session_id, turn)
        except HarnessError:
            self.sessions.add([previous])
            with suppress(StoreError):
                await self._close(session)
            raise
        await self._close(previous)
        return session

    async def _close(self, session: Session) -> None:
        """End `session` for good; may be done again when the store failed."""
        session.close()
        await self._store.set_phase(session)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        self.sessions.remove(session)
        self._metrics.sessions_open(len(self.sessions))

    async def _list(self, request: Request) -> Response:
        del request
        return json_response({"sessions": [session_summary(session) for session in self.sessions]})

    async def _record(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="application/json")
        require_admin(request.headers, self.settings.admin_token)
        session_id = request.path_params["id"]
        session = self.sessions.find(session_id)
        if session is None:
            return json_response(empty_record(session_id))
        return await asyncio.to_thread(_record_response, session.snapshot())

    async def _samples(self, request: Request) -> Response:
        session = self.sessions.find(request.path_params["id"])
        if session is None:
            return json_response({"samples": []})
        return await asyncio.to_thread(_samples_response, session.snapshot())

    async def _delete(self, request: Request) -> Response:
        session = self.sessions.find(request.path_params["id"])
        if session is not None:
            await self._close(session)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    # Turns

    async def _chat(self, request: Request) -> Response:
        body = await self._body(request)
        session = self._session_of(request)
        client = ClientConnection(request.receive, request.headers)
        call = self._turns.read_chat(session, body, client)
        if call.chat.streaming is not None:
            return self._streamed(request, call, call.chat.streaming)
        async with client.watched():
            served = await self._turns.serve_chat(call)
            is_delivered = await client.is_still_there()
        if not is_delivered:
            return json_response(served.body)
        response = json_response(served.body)
        response.background = BackgroundTask(self._delivery(request, call, served).hand_over)
        return response

    def _streamed(self, request: Request, call: ModelCall, streaming: Streaming) -> Response:
        turn = StreamedTurn(
            serve=lambda: self._turns.serve_chat(call),
            events=lambda served: stream_body(served.body, wants_usage=streaming.wants_usage),
            refusal=lambda error: self._errors.refusal(request, error),
            delivery=lambda served: self._delivery(request, call, served),
        )
        return StreamedAnswer(turn, call.client, comment_every_s=self.settings.comment_every_s)

    def _delivery(self, request: Request, call: ModelCall, served: ServedTurn) -> Delivery:
        return Delivery(request.scope, partial(self._turns.mark_delivered, call, served))

    async def _models(self, request: Request) -> Response:
        del request
        card = {"id": self._turns.model, "object": "model", "created": 0, "owned_by": "session-harness"}
        return json_response({"object": "list", "data": [card]})

    async def _alive(self, request: Request) -> Response:
        return json_response({"session_id": request.path_params["id"], "object": "session"})

    # Gate

    async def _drain(self, request: Request) -> Response:
        del request
        changed = self.gatekeeper.turn_to(GateState.DRAINING)
        sessions = list(self.sessions)
        closed = [session for session in sessions if session.drain()]
        # Those closed before as well: the store may have failed at the time.
        await asyncio.gather(*(self._store.set_phase(session) for session in sessions))
        log.info("gate_draining", changed=changed, sessions_closed=len(closed))
        return json_response(self._gate_report() | {"changed": changed, "sessions_closed": len(closed)})

    async def _pause(self, request: Request) -> Response:
        del request
        changed = self.gatekeeper.turn_to(GateState.PAUSED)
        return json_response(self._gate_report() | {"changed": changed})

    async def _resume(self, request: Request) -> Response:
        del request
        released = self.gatekeeper.held
        changed = self.gatekeeper.turn_to(GateState.OPEN)
        return json_response(self._gate_report() | {"changed": changed, "released": released if changed else 0})

    async def _gate(self, request: Request) -> Response:
        del request
        return json_response(self._gate_report())

    def _gate_report(self) -> Json:
        gate = self.gatekeeper.gate
        return {
            "state": str(gate.state),
            "epoch": gate.epoch,
            "held": self.gatekeeper.held,
            "sessions": len(self.sessions),
            "sessions_open": sum(session.is_open for session in self.sessions),
            "turns_in_flight": sum(len(session.turns_in_flight) for session in self.sessions),
            "turns_held": self.gatekeeper.held_by_work[Work.CONTINUATION],
        }

    # Weight updates

    async def _sweep(self, request: Request) -> Response:
        asked = parse_sweep(await self._body(request))
        sweep = Sweep(self._turns.engine, self._store, self.sessions, asked)
        self._last_sweep = sweep.report
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
        del request
        engine = await self._turns.engine.health()
        body = {
            "status": "ok" if engine.ready else "engine_unavailable",
            "gate": str(self.gatekeeper.gate.state),
            "engine": {
                "name": self._turns.engine.capabilities.engine,
                "ready": engine.ready,
                "paused": engine.paused,
                "running": engine.running,
                "waiting": engine.waiting,
                "detail": engine.detail,
                "weight_version": self._turns.engine.weight_version,
            },
        }
        return json_response(body, HTTPStatus.OK if engine.ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _render_metrics(self, request: Request) -> Response:
        del request
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    # What handlers share

    def _admin(self, handler: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            require_admin(request.headers, self.settings.admin_token)
            return await handler(request)

        return checked

    def _session_of(self, request: Request) -> Session:
        """The session of the path, or of the key when the path names none. Raises `SessionNotFound`."""
        session_id = request.path_params.get("id")
        if session_id is None:
            return self.sessions.by_key(credential(request.headers))
        return self.sessions.get(session_id)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self.settings.max_body_bytes)


def _record_response(session: Session) -> Response:
    return json_response(session_record(session))


def _samples_response(session: Session) -> Response:
    return json_response({"samples": [sample_to_json(sample) for sample in session.samples()]})
