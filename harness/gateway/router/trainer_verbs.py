"""Trainers' control verbs, carried out without losing the sessions' work.

`trainer` decides what a verb means. Verbs run one at a time; an `abort_all` meanwhile belongs to the current one. While
another holder has the engines a verb is refused (`engines_held`).

A trainer drives the engine of `harness serve --engine local` as it drives servers behind the router (`EngineVerbs`).
The verbs need the admin token.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.engines.sglang_server import NativeServer
from harness.errors import EngineError, EnginesHeld, HarnessError, MalformedRequest, StoreError
from harness.gateway.router.trainer import Begun, Intent, Trainer, intent_of
from harness.machine.deadlines import within
from harness.machine.log import get_logger
from harness.rollouts.client.gate import new_holder
from harness.server.app import SessionServer
from harness.server.http.access import require_admin
from harness.server.http.responses import error_response
from harness.server.http.wire import read_body
from harness.server.serving import Around
from harness.server.settings import ServerSettings
from harness.sessions.gate import Hold, HoldKind, HoldRequest, ReleaseRequest
from harness.sessions.weights.weight_update import SweepRequest
from server_patch.background import running
from server_patch.router.verbs import VERBS, Tell, VerbOrder, VerbResult

HOLD_TTL_S = 900.0
"""Seconds from a paused trainer's last verb until the gate opens."""
FOLLOW_S = 5.0
"""Wait for the verb that makes an `abort_all` or a part of weights an update."""
SWEEP_S = 30.0

ABORT_ENDED_SESSIONS = "abort_all_ended_sessions"
"""Event: nothing followed an `abort_all`; holds the number of ended sessions."""

_HOLDER = "trainer"
_HOLDERS = re.compile(rf"{_HOLDER}-[0-9a-f]{{16}}")  # of `new_holder`: others may call theirs `trainer-0`
_SWEPT_AT_ONCE = 8
_LONGEST_LOOK_S = 1.0  # a clock that was handed in may jump

log = get_logger(__name__)


class TrainerVerbs:
    def __init__(self, server: SessionServer) -> None:
        self._server = server
        self._gatekeeper = server.gatekeeper
        self._trainer = Trainer()
        self._trainer = self._recall()
        self._one_at_a_time = asyncio.Lock()  # a verb that ends must not open the gate under the next one

    async def carry_out(self, order: VerbOrder, tell: Tell) -> Sequence[VerbResult]:
        """Carry out `order` at each worker. Before any call, raises `EnginesHeld`, or `StoreError` for the hold."""
        intent = intent_of(order)
        if intent is None:
            return await tell()
        if intent is Intent.ABORT_ALL and self._one_at_a_time.locked():
            return await tell()  # it is for the verb under way, which may wait for the turns that it ends
        async with self._one_at_a_time:
            if intent is Intent.ABORT_ALL and self._others:
                return await tell()  # the holder of the gate knows what the abort is for
            if holder := next((hold.holder for hold in self._others if hold.engines), None):
                raise EnginesHeld(f"the engines are paused by the hold of {holder!r}: wait until it is released")
            return await self._carry_out(intent, tell)

    async def _carry_out(self, intent: Intent, tell: Tell) -> Sequence[VerbResult]:
        before = self._recall()
        results: Sequence[VerbResult] = ()
        is_telling = False
        try:
            if intent is not Intent.CONTINUE:
                await self._shut(before.advance(intent, obeyed=1, until=0.0).begun or Begun.WEIGHTS)
            if before.sweeps_for(intent):
                await self._sweep()
            is_telling = True
            results = await tell()
            is_telling = False
            return results
        finally:
            obeyed = sum(result.succeeded for result in results)
            until = self._gatekeeper.lease_clock() + FOLLOW_S
            self._trainer = before.advance(intent, obeyed=obeyed, until=until)
            if self._trainer.begun is not None:
                await self._note(self._trainer.begun)
            else:
                # After a verb that broke off it is unknown which workers obeyed; a worker that is not listed did not.
                are_continued = before.begun is not Begun.PAUSE or 0 < len(results) == obeyed
                await self._open(engines_continued=are_continued and not is_telling)
            self._gatekeeper.look_again()  # there may be something that is due

    async def follow(self) -> None:
        """Act when no verb follows in time."""
        while True:
            await self._gatekeeper.until(lambda: self._trainer.due is not None)
            await within(min(max(0.0, self._left_s), _LONGEST_LOOK_S), self._gatekeeper.until(self._is_over))
            async with self._one_at_a_time:
                if self._trainer.due is not None and self._is_over():
                    await self._do_what_is_due()

    @property
    def _left_s(self) -> float:
        return (self._trainer.due or 0.0) - self._gatekeeper.lease_clock()

    def _is_over(self) -> bool:
        # Another holder that shuts the gate after an abort knows what the abort was for.
        is_answered = self._trainer.begun is Begun.ABORT and bool(self._others)
        return self._left_s <= 0 or is_answered

    async def _do_what_is_due(self) -> None:
        try:
            if self._trainer.begun is Begun.ABORT and self._hold is not None and not self._others:
                log.warning(ABORT_ENDED_SESSIONS, sessions=await self._server.sessions.drain(), waited_s=FOLLOW_S)
        except StoreError as error:  # the sessions accept no turn all the same
            log.warning("session_end_not_kept", error=error.message)
        self._trainer = Trainer()
        await self._open(engines_continued=True)

    @property
    def _hold(self) -> Hold | None:
        return next(filter(_is_of_trainer, self._gatekeeper.gate.holds), None)

    @property
    def _others(self) -> list[Hold]:
        return [hold for hold in self._gatekeeper.gate.holds if not _is_of_trainer(hold)]

    def _recall(self) -> Trainer:
        # No hold: it expired, and the server continued the engines. One left by an earlier server names its work.
        if self._hold is None:
            return Trainer()
        if self._trainer.begun:
            return self._trainer
        return Trainer.of(self._hold.work, until=self._gatekeeper.lease_clock() + FOLLOW_S)

    async def _shut(self, begun: Begun) -> None:
        holder = self._hold.holder if self._hold else new_holder(_HOLDER)
        wanted = HoldRequest(holder, HOLD_TTL_S, engines=True)
        await self._gatekeeper.keep(self._gatekeeper.place(wanted, HoldKind.PAUSE, work=begun))

    async def _note(self, begun: Begun) -> None:
        if self._hold is None or self._hold.work == begun:
            return
        try:
            await self._shut(begun)
        except StoreError as error:  # a router that is started again would take it for what it was before
            log.warning("gate_hold_not_kept", error=error.message)

    async def _open(self, *, engines_continued: bool) -> None:
        if self._hold is None:
            return
        try:
            await self._gatekeeper.release(ReleaseRequest(self._hold.holder, engines_continued))
        except StoreError as error:  # the gate is open all the same; a later server ends the hold when its time is over
            log.warning("gate_hold_not_forgotten", error=error.message)

    async def _sweep(self) -> None:
        version = await self._server.live_version()
        if version is None:
            return
        try:
            await self._server.sweep(SweepRequest(version, SWEEP_S, _SWEPT_AT_ONCE))
        except MalformedRequest as error:  # workers were updated behind the router's back meanwhile
            log.warning("sweep_failed", error=error.message)


def _is_of_trainer(hold: Hold) -> bool:
    return _HOLDERS.fullmatch(hold.holder) is not None


def with_verbs(native: NativeServer, settings: ServerSettings) -> Around:
    """Wrap the application of `serve` to carry out the verbs of `native`."""

    @asynccontextmanager
    async def around(server: SessionServer) -> AsyncIterator[ASGIApp]:
        trainer = TrainerVerbs(server)
        async with running(trainer.follow()):
            yield EngineVerbs(server.app(), native, trainer, settings)

    return around


@dataclass(frozen=True, slots=True)
class EngineVerbs:
    sessions: ASGIApp
    native: NativeServer
    trainer: TrainerVerbs
    settings: ServerSettings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path in self.native.verbs and scope["method"] in VERBS[path].methods:
            answer = await self._answer(Request(scope, receive))
            await answer(scope, receive, send)
        else:
            await self.sessions(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        verb = request.url.path
        answers: list[Response] = []

        async def receive() -> Message:  # the body again, for the route of the engine
            return {"type": "http.request", "body": body, "more_body": False}

        async def tell() -> Sequence[VerbResult]:
            began = monotonic()
            try:
                answer = await self.native.verbs[verb](Request(request.scope, receive))
            except EngineError as error:
                answer = error_response(error, to_agent=False)
            answers.append(answer)
            has_done_it = answer.status_code < 300
            return [VerbResult("", "sglang", has_done_it, answer.status_code, None, monotonic() - began, "")]

        try:
            require_admin(request.headers, self.settings.admin_token)
            body = await read_body(request, self.settings.limits)
            await self.trainer.carry_out(VerbOrder(verb, request.method, request.url.query, body), tell)
        except HarnessError as error:
            return error_response(error, to_agent=False)
        return answers[-1]
