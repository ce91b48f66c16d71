"""A session server behind a front: the routes added to it, and their messages.

    PUT /sessions/shard                  set the gate state; the answer has the counts
    POST /sessions/shard/engines         resume engines that a hold left paused
    gate verbs                           refused: they belong to the front

The front owns the holds, and a shard stores none. Its gate follows the last state that it received, and is closed until
the first. Messages carry the whole state, not the verb, so the next one makes up for a lost one.

Drains are the exception, because they change sessions. They are numbered, and a shard *owes* the last one until it
answers. Until then the front sends it a closed gate, whatever the front's gate is, so that no session created after the
drain is drained.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Annotated

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from harness.decoding import read_json
from harness.errors import MalformedRequest, Misdirected
from harness.server.app import SessionServer
from harness.server.http.access import for_operators
from harness.server.http.responses import json_response
from harness.server.http.wire import read_body
from harness.sessions.gate import Gate, GateState, Hold, HoldKind

STATE_PATH = "/sessions/shard"
ENGINES_PATH = "/sessions/shard/engines"
_GATE_PATHS = tuple(f"/sessions/{verb}" for verb in ("pause", "drain", "resume", "renew", "gate", "holds"))

SHUT_BY = "front"
"""Holder that keeps a shard closed until it has the state of its front."""
_FOR_EVER = float("inf")  # only the front expires holds
_Count = Annotated[int, msgspec.Meta(ge=0)]


class DesiredHold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    holder: str
    kind: HoldKind
    engines: bool = False


class DesiredState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gate state that a shard must follow."""

    epoch: _Count
    holds: tuple[DesiredHold, ...]
    drain: _Count = 0
    """Drain that the shard owes, or 0."""


class SentState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /sessions/shard`."""

    start: str
    """Id of one start of one front."""
    telling: _Count
    """Number of this message. A shard ignores one that arrives late."""
    standing: DesiredState


class ShardCounts(msgspec.Struct, frozen=True):
    sessions: int = 0
    sessions_open: int = 0
    turns_in_flight: int = 0
    turns_held: int = 0
    """Turns in flight that wait at the gate."""
    held: int = 0
    """Requests that wait at the gate."""
    sessions_closed: int = 0
    """Sessions that drains ended since the shard started, so that a lost answer loses none."""
    released: int = 0
    """Requests that opening the gate released, in the same way."""


class DesiredStateAnswer(msgspec.Struct, frozen=True):
    """The message in force, which may be a later one or another front's."""

    start: str
    telling: int
    counts: ShardCounts


def desired_state_of(gate: Gate, *, owes: int) -> DesiredState:
    """Return the state for a shard that owes drain `owes` (0 for none)."""
    holds = tuple(DesiredHold(hold.holder, hold.kind, hold.engines) for hold in gate.holds)
    if owes:
        holds = (*holds, DesiredHold(SHUT_BY, HoldKind.PAUSE))
    return DesiredState(gate.epoch, holds, owes)


def mirrored(standing: DesiredState) -> list[Hold]:
    """Convert `standing` for the gate of a shard."""
    return [Hold(hold.holder, hold.kind, _FOR_EVER, hold.engines) for hold in standing.holds]


AT_FIRST = DesiredState(0, (DesiredHold(SHUT_BY, HoldKind.PAUSE),))
"""State of a shard before its first message."""


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
            told = read_json(body, SentState)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedRequest(f"expected the desired state of a shard: {error}") from error
        if told.start == self._told_by and told.telling <= self._telling:
            return json_response(await self._answer())
        self._told_by, self._telling = told.start, told.telling
        gatekeeper = self._server.gatekeeper
        waited = gatekeeper.held if gatekeeper.gate.state is not GateState.OPEN else 0
        gatekeeper.mirror(mirrored(told.standing), told.standing.epoch)
        self._released += waited if gatekeeper.gate.state is GateState.OPEN else 0
        if told.standing.drain > self._drain:
            closed = await self._server.sessions.drain()  # the front may tell again meanwhile
            self._closed += closed
            self._drain = told.standing.drain
        return json_response(await self._answer())

    async def _answer(self) -> DesiredStateAnswer:
        counts = (await self._server.count_sessions())._asdict()
        del counts["problems"]  # those of shards
        counts |= {"sessions_closed": self._closed, "released": self._released}
        return DesiredStateAnswer(self._told_by, self._telling, ShardCounts(**counts))

    async def _continue_engines(self, request: Request) -> Response:
        await self._server.left_engines.wake()
        return Response(status_code=HTTPStatus.NO_CONTENT)


async def _refuse(request: Request) -> Response:
    raise Misdirected(f"{request.url.path}: the gate of a shard is its front's; ask at the front's address")
