"""The questions of agents to a session server: model calls, each dialect at its own route, and the name of the model.

The path prefix `/sessions/<id>` is a session's identity, its key proves it; on `/v1/...` the key is both. `TurnService`
makes a turn of a call, and the dialect of the route makes bytes of the turn, whole or streamed. A retry is answered
from the recorded turn by the dialect of the route that it came to.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from harness.dialects.dialect import CountingDialect, Dialect
from harness.dialects.model_request import ModelAnswer, ModelRequest, ToolMode, WireCall
from harness.dialects.sse import MEDIA_TYPE
from harness.engines.remote.served_model import SESSION_SERVER
from harness.errors import HarnessError, MalformedRequest, ResponseNotFound
from harness.machine.http_protocol import Delivery
from harness.server.access import credential, is_operator, require_key
from harness.server.connection import CallPlaces, ClientConnection
from harness.server.registry import SessionRegistry
from harness.server.responses import ErrorAnswers, json_response
from harness.server.turns import ModelCall, ServedTurn, TurnService
from harness.server.wire import read_body
from harness.sessions.session import Session
from harness.types import Json, SamplingWishes

_T = TypeVar("_T")

_HEADERS_OF_STREAMS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_MANY_LOGPROBS = 3_000  # entries of an answer, written in some milliseconds
_ENTRY_BYTES = 500  # of memory


class ModelCalls:
    """The model calls of one server's agents."""

    def __init__(self, turns: TurnService, sessions: SessionRegistry, errors: ErrorAnswers) -> None:
        self._turns = turns
        self._sessions = sessions
        self._errors = errors
        self._settings = turns.settings
        self._places = CallPlaces(turns.settings.limits)

    def routes(self) -> list[Route]:
        """Below the base URL of every session, and at the root for clients that know a key and no path."""
        return [
            *(
                Route(f"{base}{dialect.path}", partial(self._answer, dialect), methods=["POST"])
                for base in ("/sessions/{id}", "")
                for dialect in self._settings.dialects
            ),
            *(
                Route(f"{base}{dialect.stored_path}", partial(self._stored, dialect), methods=["GET"])
                for base in ("/sessions/{id}", "")
                for dialect in self._settings.dialects
                if dialect.stored_path is not None
            ),
            *(
                Route(f"{base}{dialect.count_path}", partial(self._count, dialect), methods=["POST"])
                for base in ("/sessions/{id}", "")
                for dialect in self._settings.dialects
                if isinstance(dialect, CountingDialect)
            ),
            Route("/sessions/{id}/v1/models", self._models, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        session = await self._session_of(request)
        with ExitStack() as place:
            count = place.enter_context(self._places.take(session.session_id))
            body = await read_body(request, self._settings.limits, count)
            return await self._answer_call(dialect, request, session, body, place)

    async def _answer_call(
        self, dialect: Dialect, request: Request, session: Session, body: bytes, place: ExitStack
    ) -> Response:
        """The answer to the call that `body` is; a streamed one keeps its `place`."""
        client = ClientConnection(request.receive, request.headers)
        wire = WireCall(body, request.headers, request.query_params, session.turns_until, session.caller)
        with _count_refusals(session):
            call = await self._turns.read(session, dialect, wire, client)
        if call.request.streaming is not None:
            stream = dialect.stream(call.head)
            turn = StreamedTurn(
                serve=partial(self._serve, call),
                content=lambda served: self._write(call, served, lambda answer: b"".join(stream.end(answer))),
                keep_alive=stream.keep_alive,
                failure=partial(self._errors.end_stream, request, stream, call.head.response_id),
                delivery=partial(self._delivery, request, call),
            )
            return StreamedAnswer(turn, client, place.pop_all(), comment_every_s=self._settings.comment_every_s)
        async with client.watch():
            served = await self._serve(call)
            content = await self._write(call, served, lambda answer: msgspec.json.encode(dialect.answer(answer)))
            is_delivered = await client.is_still_there()
        response = Response(content, media_type="application/json")
        if is_delivered:
            response.background = BackgroundTask(self._delivery(request, call, served).hand_over)
        return response

    async def _serve(self, call: ModelCall) -> ServedTurn:
        turns = self._turns
        with _count_refusals(call.session), self._sessions.in_use(call.session), turns.callers.present(call.client):
            served = await turns.serve(call)
        turns.metrics.turn_served(max(0.0, turns.clock() - call.began_at - served.turn.seconds))
        return served

    async def _write(self, call: ModelCall, served: ServedTurn, write: Callable[[ModelAnswer], bytes]) -> bytes:
        """The answer with a turn, as `write` has it; one with many logprobs is written off the event loop."""
        turns = self._turns
        answer = ModelAnswer(
            call.request,
            served.turn,
            turns.model,
            turns.chat_tokenizer.tokenizer.token_text,
            served.top_logprobs,
            is_guarded=turns.engine.capabilities.repeat_guard is not None,
        )
        alternatives = 0 if served.top_logprobs is None else served.top_logprobs.ids.shape[1]
        entries = int(served.turn.output_ids.size) * (1 + alternatives) if call.request.wants_logprobs else 0
        if entries <= _MANY_LOGPROBS:
            return write(answer)
        with _count_refusals(call.session):
            return await turns.heavy_work.do(entries * _ENTRY_BYTES, partial(write, answer))

    def _delivery(self, request: Request, call: ModelCall, served: ServedTurn) -> Delivery:
        """By the session's id: until its next request, an idle connection keeps what it may have to call."""
        mark = partial(self._sessions.mark_delivered, call.session.session_id, served.turn.index)
        return Delivery(request.scope, mark)

    async def _stored(self, dialect: Dialect, request: Request) -> Response:
        """The answer that was given under an id, once more; one that no agent may see was not given (I2)."""
        session, response_id = await self._session_of(request), request.path_params["response_id"]
        turns = session.turns_until(response_id)
        if not turns or not session.serves(turns[-1]):
            raise ResponseNotFound(response_id)
        if request.query_params.get("stream", "false") != "false":
            raise MalformedRequest("stream: expected false, a stored answer is given whole", param="stream")
        asked = ModelRequest(dialect.name, (), (), ToolMode.AUTO, None, SamplingWishes(), False, self._turns.model)
        token_text = self._turns.chat_tokenizer.tokenizer.token_text
        return json_response(dialect.answer(ModelAnswer(asked, turns[-1], self._turns.model, token_text)))

    async def _count(self, dialect: CountingDialect, request: Request) -> Response:
        """How long the prompt of the call would be that has this body; nothing of it is recorded."""
        session = await self._session_of(request)
        with self._places.take(session.session_id) as count, self._sessions.in_use(session):
            body = await read_body(request, self._settings.limits, count)
            client = ClientConnection(request.receive, request.headers)
            wire = WireCall(body, request.headers, request.query_params, session.turns_until, session.caller)
            tokens = await self._turns.count(await self._turns.read(session, dialect, wire, client))
        return json_response(dialect.count_answer(tokens))

    async def _models(self, request: Request) -> Response:
        if not is_operator(request.headers, self._settings.admin_token):
            await self._session_of(request)
        card = {"id": self._turns.model, "object": "model", "created": 0, "owned_by": SESSION_SERVER}
        # A client that says which one it is wants descriptions of its own form, and takes none for an answer.
        described: Json = {"models": []} if "client_version" in request.query_params else {}
        return json_response({"object": "list", "data": [card], **described})

    async def _session_of(self, request: Request) -> Session:
        """The session that a request is for. Raises `Unauthorized`, `SessionNotFound`, or `StoreError`."""
        session_id = request.path_params.get("id")
        if session_id is not None and not self._settings.needs_keys:
            return await self._sessions.get(session_id)
        key = require_key(request.headers) if self._settings.needs_keys else credential(request.headers)
        if session_id is None:
            return await self._sessions.by_key(key)
        return await self._sessions.of_key(session_id, key)


@contextmanager
def _count_refusals(session: Session) -> Iterator[None]:
    """Remember in `session` the error with which the block ends a model call of its agent."""
    try:
        yield
    except HarnessError as error:
        session.refuse(error)
        raise


@dataclass(frozen=True, slots=True)
class StreamedTurn(Generic[_T]):
    """The turn of a streamed answer, as far as the answer asks."""

    serve: Callable[[], Coroutine[Any, Any, _T]]
    """Serves the turn; raises `HarnessError`."""
    content: Callable[[_T], Coroutine[Any, Any, bytes]]
    """Everything that is sent of a served turn; raises `HarnessError`."""
    keep_alive: Callable[[], bytes]
    """The next part that says no more than that somebody is there."""
    failure: Callable[[HarnessError], bytes]
    """Everything that is sent of an error, once the answer has begun."""
    delivery: Callable[[_T], Delivery]
    """Is told when a served turn has been handed over to a client that is still there."""


class StreamedAnswer(Response, Generic[_T]):
    """The response that serves a turn while its client listens, as server-sent events.

    An error that comes soon has its own status, as in an answer that is not streamed. A client that has waited for a
    while gets an event that says no more than that, and one more every so often while the gate holds its turn or the
    engine samples, so that nobody times out; an error is then an event in the form of the dialect, and ends the answer.
    Of the turn nothing is sent before it is durable (I9): deltas are cut from the recorded answer, not passed on while
    the engine samples.
    """

    media_type = MEDIA_TYPE

    def __init__(
        self, turn: StreamedTurn[_T], client: ClientConnection, place: ExitStack, *, comment_every_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS_OF_STREAMS)
        self._turn = turn
        self._client = client
        self._place = place
        self._comment_every_s = comment_every_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the turn. Raises its error when that comes before anything was sent."""
        del scope, receive
        with self._place:
            await self._serve_and_send(send)

    async def _serve_and_send(self, send: Send) -> None:
        async with self._client.watch(), _run(self._turn.serve()) as serving:
            content = await self._turn.content(await serving) if await self._ends_soon(serving) else None
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while not serving.done():
                await send({"type": "http.response.body", "body": self._turn.keep_alive(), "more_body": True})
                await self._ends_soon(serving)
            try:
                answer = await serving
                if content is None:
                    content = await self._turn.content(answer)
            except HarnessError as error:  # a bug goes its way: an answer without an end is never read as whole
                await send({"type": "http.response.body", "body": self._turn.failure(error)})
                return
            delivery = self._turn.delivery(answer)
            await send({"type": "http.response.body", "body": content, "more_body": True})
            # Asked before the end: the web server reports every client as gone once its response is complete.
            is_delivered = await self._client.is_still_there()
            await send({"type": "http.response.body"})
            if is_delivered:
                await delivery.hand_over()

    async def _ends_soon(self, serving: asyncio.Task[_T]) -> bool:
        """Whether the turn has an outcome, now or before the next keep-alive is due."""
        await asyncio.wait([serving], timeout=self._comment_every_s)
        return serving.done()


@asynccontextmanager
async def _run(coroutine: Coroutine[Any, Any, _T]) -> AsyncIterator[asyncio.Task[_T]]:
    """`coroutine` as a task that has ended by the end of the block."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
