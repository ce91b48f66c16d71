"""Model calls of agents: each dialect at its own route, and the model's name.

Below `/sessions/<id>` the path names the session and its key proves it; below `/v1` the key does both. A retry gets the
recorded turn in the dialect of its own route.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, starmap
from typing import NamedTuple

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness.dialects.dialect import AnswerStream, CountingDialect, Dialect
from harness.dialects.model_request import ModelAnswer, ModelRequest, ToolMode, WireCall
from harness.engines.remote.served_model import SESSION_SERVER
from harness.errors import AnswerChanged, HarnessError, MalformedRequest, ResponseNotFound
from harness.machine.http_protocol import Delivery
from harness.server.http.access import credential, is_operator, require_key
from harness.server.http.connection import CallPlaces, ClientConnection
from harness.server.http.responses import ErrorAnswers, json_response
from harness.server.http.streamed_answer import StreamedAnswer, StreamedTurn
from harness.server.http.wire import read_body
from harness.server.registry import SessionRegistry
from harness.server.turns import ModelCall, ServedTurn, TurnService
from harness.sessions.session import Session
from harness.types import Json, SamplingWishes, Turn

_MANY_LOGPROBS = 3_000  # log entries per answer, encoded in a few milliseconds
_ENTRY_BYTES = 500  # of memory


class ModelCalls:
    def __init__(self, turns: TurnService, sessions: SessionRegistry, errors: ErrorAnswers) -> None:
        self._turns = turns
        self._sessions = sessions
        self._errors = errors
        self._settings = turns.settings
        self._places = CallPlaces(turns.settings.limits)

    def routes(self) -> list[Route]:
        """Return the routes below session URLs, and at the root for clients that know only a key."""
        served = [(base, dialect) for base in ("/sessions/{id}", "") for dialect in self._settings.dialects]
        return [
            *chain.from_iterable(starmap(self._routes_of, served)),  # first: each call looks for its route
            *(
                Route(f"{base}{dialect.stored_path}", partial(self._stored, dialect), methods=["GET"])
                for base, dialect in served
                if dialect.stored_path is not None
            ),
            Route("/sessions/{id}/v1/models", self._models, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]

    def _routes_of(self, base: str, dialect: Dialect) -> Iterator[Route]:
        any_model = ("{model}", "{model:path}")  # names from the Hub have a slash
        if isinstance(dialect, CountingDialect):
            path = base + dialect.count_path.replace(*any_model)
            yield Route(path, partial(self._count, dialect), methods=["POST"])
        yield Route(base + dialect.path.replace(*any_model), partial(self._answer, dialect), methods=["POST"])

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        session = await self._session_of(request)
        with ExitStack() as place:
            count = place.enter_context(self._places.take(session.session_id))
            body = await read_body(request, self._settings.limits, count)
            client = ClientConnection.of(request)
            with _CountRefusals(session):
                call = await self._turns.read(session, dialect, _wire_call(body, request, session), client)
            if call.request.streaming is not None:
                stream = dialect.stream(call.head)
                turn = StreamedTurn(
                    stream,
                    call.live_text,
                    serve=partial(self._serve, call),
                    content=partial(self._end_stream, call, stream),
                    failure=partial(self._errors.end_stream, request, stream, call.head.response_id),
                    delivery=partial(self._delivery, request, call),
                )
                kind, silence_s = call.request.streaming.media_type, self._settings.comment_every_s
                return StreamedAnswer(turn, client, place.pop_all(), media_type=kind, comment_every_s=silence_s)
            with client.watch():
                served = await self._serve(call)
                content = await self._write(call, served, lambda answer: msgspec.json.encode(dialect.answer(answer)))
            response = Response(content, media_type="application/json")
            if not client.has_left:
                response.background = BackgroundTask(self._delivery(request, call, served).hand_over)
            return response

    async def _serve(self, call: ModelCall) -> ServedTurn:
        turns = self._turns
        with _CountRefusals(call.session), self._sessions.in_use(call.session), turns.callers.present(call.client):
            served = await turns.serve(call)
        turns.metrics.overhead.observe(max(0.0, turns.clock() - call.began_at - served.turn.seconds))
        return served

    async def _end_stream(self, call: ModelCall, stream: AnswerStream, served: ServedTurn) -> bytes:
        # The client would get an answer that contradicts the parts already sent.
        turn, live_text = served.turn, call.live_text
        has_other_text = live_text.has_spoken and not live_text.agrees_with(turn.reply)
        has_other_id = stream.has_told_id and turn.notes.response_id != call.head.response_id
        if has_other_text or has_other_id:
            with _CountRefusals(call.session):
                raise AnswerChanged(
                    f"turn {turn.index} has another {'text' if has_other_text else 'id'} than its stream has said;"
                    " ask again"
                )
        return await self._write(call, served, lambda answer: b"".join(stream.end(answer)))

    async def _write(self, call: ModelCall, served: ServedTurn, write: Callable[[ModelAnswer], bytes]) -> bytes:
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
        with _CountRefusals(call.session):
            return await turns.heavy_work.do(entries * _ENTRY_BYTES, partial(write, answer))

    def _delivery(self, request: Request, call: ModelCall, served: ServedTurn) -> Delivery:
        # Refers to the session by id, because an idle connection keeps this until its next request.
        mark = partial(self._sessions.mark_delivered, call.session.session_id, served.turn.index)
        return Delivery(request.scope, mark)

    async def _stored(self, dialect: Dialect, request: Request) -> Response:
        # An answer that no agent may see does not exist here (I2).
        session, response_id = await self._session_of(request), request.path_params["response_id"]
        turns = session.turns_until(response_id)
        if not turns or not session.serves(turns[-1]):
            raise ResponseNotFound(response_id)
        if request.query_params.get("stream", "false") != "false":
            raise MalformedRequest("stream: expected false, a stored answer is not streamed", param="stream")
        asked = ModelRequest(dialect.name, (), (), ToolMode.AUTO, None, SamplingWishes(), False, self._turns.model)
        token_text = self._turns.chat_tokenizer.tokenizer.token_text
        return json_response(dialect.answer(ModelAnswer(asked, turns[-1], self._turns.model, token_text)))

    async def _count(self, dialect: CountingDialect, request: Request) -> Response:
        session = await self._session_of(request)
        with self._places.take(session.session_id) as count, self._sessions.in_use(session):
            body = await read_body(request, self._settings.limits, count)
            client = ClientConnection.of(request)
            wire = _wire_call(body, request, session)
            tokens = await self._turns.count(await self._turns.read(session, dialect, wire, client))
        return json_response(dialect.count_answer(tokens))

    async def _models(self, request: Request) -> Response:
        if not is_operator(request.headers, self._settings.admin_token):
            await self._session_of(request)
        card = {"id": self._turns.model, "object": "model", "created": 0, "owned_by": SESSION_SERVER}
        # A client that sends its version expects its own form, and ignores an empty list.
        described: Json = {"models": []} if "client_version" in request.query_params else {}
        return json_response({"object": "list", "data": [card], **described})

    async def _session_of(self, request: Request) -> Session:
        session_id = request.path_params.get("id")
        if session_id is not None and not self._settings.needs_keys:
            return await self._sessions.get(session_id)
        key = require_key(request.headers) if self._settings.needs_keys else credential(request.headers)
        if session_id is None:
            return await self._sessions.by_key(key)
        return await self._sessions.of_key(session_id, key)


def _wire_call(body: bytes, request: Request, session: Session) -> WireCall:
    def answered_as(response_id: str) -> Turn | None:  # agents never got the answer of a turn that is not served
        turn = session.answered_as(response_id)
        return turn if turn is not None and session.serves(turn) else None

    query = request.query_params if request.scope["query_string"] else {}
    return WireCall(
        body, request.headers, query, request.scope["path"], session.turns_until, session.caller, answered_as
    )


class _CountRefusals(NamedTuple):  # each turn enters two: a generator costs three times as much
    session: Session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, HarnessError):
            self.session.refuse(error)
