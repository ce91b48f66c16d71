"""What an agent asks a session server: model calls, each dialect at its own route, and the name of the model.

The path prefix `/sessions/<id>` is a session's identity, its key proves it; on `/v1/...` the key is both. `TurnService`
makes a turn of a call, and the dialect of the route makes bytes of the turn, whole or streamed. A retry is answered
from the recorded turn by the dialect of the route that it came to.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from harness.dialects.dialect import Dialect
from harness.dialects.model_request import ModelAnswer
from harness.engines.remote.served_model import SESSION_SERVER
from harness.errors import HarnessError
from harness.server.access import credential, is_operator, require_key
from harness.server.connection import ClientConnection
from harness.server.http_protocol import Delivery
from harness.server.registry import SessionRegistry
from harness.server.requests import read_body
from harness.server.responses import ErrorAnswers, json_response
from harness.server.streaming import StreamedAnswer, StreamedTurn
from harness.server.turns import ModelCall, ServedTurn, TurnService
from harness.sessions.session import Session

_MANY_LOGPROBS = 3_000  # entries of an answer, written in some milliseconds
_ENTRY_BYTES = 500  # of memory


@dataclass(frozen=True, slots=True)
class _Answer:
    """A turn, and everything that is sent of it."""

    served: ServedTurn
    content: bytes


class ModelCalls:
    """The model calls of one server's agents."""

    def __init__(self, turns: TurnService, sessions: SessionRegistry, errors: ErrorAnswers) -> None:
        self._turns = turns
        self._sessions = sessions
        self._errors = errors
        self._settings = turns.settings

    def routes(self) -> list[Route]:
        """Below the base URL of every session, and at the root for clients that know a key and no path."""
        return [
            *(
                Route(f"{base}{dialect.path}", partial(self._answer, dialect), methods=["POST"])
                for base in ("/sessions/{id}", "")
                for dialect in self._settings.dialects
            ),
            Route("/sessions/{id}/v1/models", self._models, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]

    async def _answer(self, dialect: Dialect, request: Request) -> Response:
        session = self._session_of(request)
        body = await read_body(request, self._settings.limits)
        client = ClientConnection(request.receive, request.headers)
        with _count_refusals(session):
            call = await self._turns.read(session, dialect, body, client)
        if call.request.streaming is not None:
            turn = StreamedTurn(
                serve=partial(self._serve, dialect, call),
                content=lambda answer: answer.content,
                failure=partial(self._errors.end_stream, request),
                delivery=lambda answer: self._delivery(request, call, answer),
            )
            return StreamedAnswer(turn, client, comment_every_s=self._settings.comment_every_s)
        async with client.watched():
            answer = await self._serve(dialect, call)
            is_delivered = await client.is_still_there()
        response = Response(answer.content, media_type="application/json")
        if is_delivered:
            response.background = BackgroundTask(self._delivery(request, call, answer).hand_over)
        return response

    async def _serve(self, dialect: Dialect, call: ModelCall) -> _Answer:
        """Have the call served, and write its answer; one with many logprobs is written off the event loop."""
        turns = self._turns
        with _count_refusals(call.session), self._sessions.in_use(call.session), turns.callers.present(call.client):
            served = await turns.serve(call)
            is_guarded = turns.engine.capabilities.repeat_guard is not None
            token_text = turns.chat_tokenizer.tokenizer.token_text
            answer = ModelAnswer(call.request, served.turn, turns.model, token_text, served.top_logprobs, is_guarded)
            write = partial(_write, dialect, answer)
            alternatives = 0 if served.top_logprobs is None else served.top_logprobs.ids.shape[1]
            entries = int(served.turn.output_ids.size) * (1 + alternatives) if call.request.wants_logprobs else 0
            is_long = entries > _MANY_LOGPROBS
            content = await turns.heavy_work.do(entries * _ENTRY_BYTES, write) if is_long else write()
        turns.metrics.turn_served(max(0.0, turns.clock() - call.began_at - served.turn.seconds))
        return _Answer(served, content)

    def _delivery(self, request: Request, call: ModelCall, answer: _Answer) -> Delivery:
        return Delivery(request.scope, partial(self._turns.mark_delivered, call, answer.served))

    async def _models(self, request: Request) -> Response:
        if not is_operator(request.headers, self._settings.admin_token):
            self._session_of(request)
        card = {"id": self._turns.model, "object": "model", "created": 0, "owned_by": SESSION_SERVER}
        return json_response({"object": "list", "data": [card]})

    def _session_of(self, request: Request) -> Session:
        """The session that a request is for. Raises `Unauthorized` or `SessionNotFound`."""
        session_id = request.path_params.get("id")
        if session_id is not None and not self._settings.needs_keys:
            return self._sessions.get(session_id)
        key = require_key(request.headers) if self._settings.needs_keys else credential(request.headers)
        return self._sessions.by_key(key) if session_id is None else self._sessions.of_key(session_id, key)


@contextmanager
def _count_refusals(session: Session) -> Iterator[None]:
    """Remember in `session` the error with which the block ends a model call of its agent."""
    try:
        yield
    except HarnessError as error:
        session.refuse(error)
        raise


def _write(dialect: Dialect, answer: ModelAnswer) -> bytes:
    if answer.request.streaming is None:
        return msgspec.json.encode(dialect.answer(answer))
    return b"".join(dialect.stream_parts(answer))
