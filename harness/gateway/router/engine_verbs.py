"""SGLang's control verbs for an engine of this process.

A trainer drives the engine of `harness serve --engine local` as it drives servers behind the router. The verbs need the
admin token.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from harness.engines.sglang_server import NativeServer
from harness.errors import EngineError, HarnessError
from harness.gateway.router.trainer_verbs import TrainerVerbs
from harness.server.app import SessionServer
from harness.server.http.access import require_admin
from harness.server.http.responses import error_response
from harness.server.http.wire import read_body
from harness.server.serving import Around
from harness.server.settings import ServerSettings
from server_patch.background import running
from server_patch.router.verbs import VERBS, VerbOrder, VerbResult


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
