"""A session server behind a front: the routes added to it.

    PUT /sessions/shard                  set the gate state; the answer has the counts
    POST /sessions/shard/engines         resume engines that a hold left paused
    gate verbs                           refused: they belong to the front

The gate is closed from before the first request until the front sends its state. A shard stores no holds.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from harness.errors import MalformedRequest, Misdirected
from harness.gateway.shards.desired_state import AT_FIRST, DesiredStateAnswer, SentState, ShardCounts, mirrored
from harness.server.app import SessionServer
from harness.server.http.access import for_operators
from harness.server.http.responses import json_response
from harness.server.http.wire import read_body
from harness.sessions.gate import GateState, Work

STATE_PATH = "/sessions/shard"
ENGINES_PATH = "/sessions/shard/engines"
_GATE_PATHS = tuple(f"/sessions/{verb}" for verb in ("pause", "drain", "resume", "renew", "gate", "holds"))

_tellings = msgspec.json.Decoder(SentState)


@asynccontextmanager
async def as_shard(server: SessionServer) -> AsyncIterator[ASGIApp]:
    """Return the application for `serve`, with the gate closed."""
    server.gatekeeper.mirror(mirrored(AT_FIRST), AT_FIRST.epoch)
    yield Shard(server)


class Shard:
    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self._sessions = server.app()
        self._settings = server.settings
        self._told_by, self._telling = "", -1
        self._drain = self._closed = self._released = 0
        admin = partial(for_operators, admin_token=server.settings.admin_token)
        self._paths = frozenset({STATE_PATH, ENGINES_PATH, *_GATE_PATHS})
        self._own = Starlette(
            routes=[
                Route(STATE_PATH, admin(self._stand), methods=["PUT"]),
                Route(ENGINES_PATH, admin(self._continue_engines), methods=["POST"]),
                *(Route(path, admin(_refuse), methods=["GET", "POST"]) for path in _GATE_PATHS),
            ],
            exception_handlers=server.errors.by_type(),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_own = scope["type"] == "http" and scope["path"] in self._paths
        await (self._own if is_own else self._sessions)(scope, receive, send)

    async def _stand(self, request: Request) -> Response:
        body = await read_body(request, self._settings.limits)
        try:
            told = _tellings.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedRequest(f"expected the desired state of a shard: {error}") from error
        if told.start == self._told_by and told.telling <= self._telling:
            return json_response(self._answer())
        self._told_by, self._telling = told.start, told.telling
        gatekeeper = self._server.gatekeeper
        waited = gatekeeper.held if gatekeeper.gate.state is not GateState.OPEN else 0
        gatekeeper.mirror(mirrored(told.standing), told.standing.epoch)
        self._released += waited if gatekeeper.gate.state is GateState.OPEN else 0
        if told.standing.drain > self._drain:
            closed = await self._server.sessions.drain()  # the front may tell again meanwhile
            self._closed += closed
            self._drain = told.standing.drain
        return json_response(self._answer())

    def _answer(self) -> DesiredStateAnswer:
        sessions, gatekeeper = self._server.sessions, self._server.gatekeeper
        counts = ShardCounts(
            sessions=len(sessions),
            sessions_open=sum(session.is_open for session in sessions),
            turns_in_flight=sum(len(session.turns_in_flight) for session in sessions),
            turns_held=gatekeeper.held_by_work[Work.CONTINUATION],
            held=gatekeeper.held,
            sessions_closed=self._closed,
            released=self._released,
        )
        return DesiredStateAnswer(self._told_by, self._telling, counts)

    async def _continue_engines(self, request: Request) -> Response:
        await self._server.left_engines.wake()
        return Response(status_code=HTTPStatus.NO_CONTENT)


async def _refuse(request: Request) -> Response:
    raise Misdirected(f"{request.url.path}: the gate of a shard is its front's; ask at the front's address")
