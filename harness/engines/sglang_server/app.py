"""SGLang's native routes over a `TokenProvider`, as far as the session harness and its router use them.

    /generate                                   ids in, ids out; whole or as events
    /abort_request /pause_generation /continue_generation /flush_cache /update_weights_from_disk
    /model_info /server_info /v1/models /v1/loads /health /ready /metrics /tokenize

Only translates; the promises are the provider's. `/server_info` names the real engine (`engine`). Unlike SGLang, it
keeps aborts of requests that a pause holds, matches request ids exactly, changes weights between two tokens without
waiting for requests, keeps the model's name, and never generates in `/health`. It has no chat routes or templates.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from harness._version import __version__
from harness.engines.base import CountsTokens, FlushesPrefixes, TokenProvider
from harness.engines.sglang_server.replies import chunk, last_chunk, prompt_reply, whole_reply
from harness.engines.sglang_server.requests import (
    PAUSES,
    AbortRequest,
    ContinueRequest,
    GenerateRequest,
    PauseRequest,
    TokenizeRequest,
    UpdateRequest,
    decode,
)
from harness.engines.sglang_server.serving import EventStream, while_connected
from harness.errors import EngineError, EngineRejected, EngineUnavailable
from harness.tokens.tokenizer import Tokenizer
from harness.types import GenerationDelta, Json, as_ids

_NOBODY_READS = 499


class NativeServer:
    """The application for `provider`, which its owner has entered; `tokenizer` and `model_path` are its model's."""

    def __init__(self, provider: TokenProvider, tokenizer: Tokenizer, model_path: Path) -> None:
        self._provider = provider
        self._tokenizer = tokenizer
        self._model_path = model_path
        self._started_at, self._generations = time.time(), 0
        self.verbs: Mapping[str, Callable[[Request], Awaitable[Response]]] = MappingProxyType(
            {
                "/abort_request": self._abort,
                "/pause_generation": self._pause,
                "/continue_generation": self._continue,
                "/flush_cache": self._flush_cache,
                "/update_weights_from_disk": self._update_weights,
            }
        )

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self._generate, methods=["POST", "PUT"]),
                *(
                    Route(path, verb, methods=["GET", "POST"] if path == "/flush_cache" else ["POST"])
                    for path, verb in self.verbs.items()
                ),
                Route("/model_info", self._model_info, methods=["GET"]),
                Route("/server_info", self._server_info, methods=["GET"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/loads", self._loads, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/v1/tokenize", self._tokenize, methods=["POST"]),
            ],
            exception_handlers={EngineError: _answer_error, ClientDisconnect: _answer_nobody},
        )

    async def _generate(self, request: Request) -> Response:
        asked = decode(await request.body(), GenerateRequest)
        self._generations += 1
        if asked.stream:
            return EventStream(self._events(asked))
        return _json(await while_connected(request.receive, self._whole(asked)))

    async def _whole(self, asked: GenerateRequest) -> Json:
        if asked.samples_nothing:
            start = asked.scores_from or len(asked.input_ids)
            ids, top = as_ids(asked.input_ids), asked.params.top_logprobs
            return prompt_reply(asked, await self._provider.score(ids, start=start, top=top))
        if asked.probes_guard and self._guard:
            asked.sampling_params.max_new_tokens = 1
        result = await self._provider.generate(asked.generation)
        return whole_reply(asked, result, self._provider.weight_version, self._guard)

    async def _events(self, asked: GenerateRequest) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._chunks(asked)) as chunks:
                async for each in chunks:
                    yield msgspec.json.encode(each)
        except EngineError as error:
            # An event, because the status has been sent.
            yield msgspec.json.encode(_error_body(error))
        yield b"[DONE]"

    async def _chunks(self, asked: GenerateRequest) -> AsyncGenerator[Json]:
        # Alternatives are known only at the end, so these come in one chunk.
        if asked.samples_nothing or asked.probes_guard or asked.params.top_logprobs:
            yield await self._whole(asked)
            return
        count = 0
        stream = self._provider.stream(asked.generation)
        async with aclosing(stream) as pieces:  # type: ignore[type-var]  # an async generator, which the protocol does not say
            async for piece in pieces:
                if isinstance(piece, GenerationDelta):
                    count += int(piece.output_ids.size)
                    yield chunk(asked, piece, count, self._provider.weight_version)
                else:
                    yield last_chunk(asked, piece, self._provider.weight_version, self._guard)

    async def _abort(self, request: Request) -> Response:
        asked = decode(await request.body(), AbortRequest)
        if asked.abort_all or asked.rid:
            await self._provider.abort(None if asked.abort_all else asked.rid)
        return Response()

    async def _pause(self, request: Request) -> Response:
        await self._provider.pause(PAUSES[decode(await request.body(), PauseRequest).mode])
        return _json({"status": "ok", "message": "Generation paused."})

    async def _continue(self, request: Request) -> Response:
        decode(await request.body(), ContinueRequest)
        await self._provider.resume()
        return _json({"status": "ok", "message": "Generation continued."})

    async def _flush_cache(self, request: Request) -> Response:
        if isinstance(self._provider, FlushesPrefixes) and not await self._provider.flush_cache():
            raise EngineRejected("the cache is not flushed while requests are live: abort or await them first")
        return Response("Cache flushed.\n")

    async def _update_weights(self, request: Request) -> Response:
        asked = decode(await request.body(), UpdateRequest)
        if asked.abort_all_requests:
            await self._provider.abort(None)
        version = self._provider.weight_version if asked.weight_version is None else asked.weight_version
        try:
            await self._provider.update_weights(Path(asked.model_path), version)
        except EngineError as error:
            return _json({"success": False, "message": error.message, "num_paused_requests": 0}, _status(error))
        self._model_path = Path(asked.model_path)
        return _json({"success": True, "message": f"weights of {asked.model_path}", "num_paused_requests": 0})

    async def _model_info(self, request: Request) -> Response:
        return _json(
            {
                "model_path": str(self._model_path),
                "served_model_name": self._provider.capabilities.model,
                "weight_version": self._provider.weight_version,
                "is_generation": True,
            }
        )

    async def _server_info(self, request: Request) -> Response:
        capabilities = self._provider.capabilities
        return _json(
            {
                "engine": capabilities.engine,
                "version": __version__,
                "served_model_name": capabilities.model,
                "max_req_input_len": capabilities.context_length - 1,
                "sampling_mask_max_tokens": capabilities.max_mask_ids,
                "grammar_backend": "own" if capabilities.follows_json_schema else "none",
                "incremental_streaming_output": True,
                "skip_tokenizer_init": True,
            }
        )

    async def _models(self, request: Request) -> Response:
        capabilities = self._provider.capabilities
        card = {"id": capabilities.model, "object": "model", "owned_by": capabilities.engine}
        limits = {"root": capabilities.model, "max_model_len": capabilities.context_length}
        return _json({"object": "list", "data": [card | limits]})

    async def _loads(self, request: Request) -> Response:
        health = await self._provider.health()
        if not health.ready:
            raise EngineUnavailable(f"the engine does not serve: {health.detail}")
        load = {"dp_rank": 0, "num_running_reqs": health.running, "num_waiting_reqs": health.waiting}
        return _json({"version": __version__, "loads": [load]})

    async def _health(self, request: Request) -> Response:
        health = await self._provider.health()
        return Response(status_code=200 if health.ready else 503)

    async def _ready(self, request: Request) -> Response:
        health = await self._provider.health()
        return Response(status_code=200 if health.ready and not health.paused else 503)

    async def _metrics(self, request: Request) -> Response:
        if not isinstance(self._provider, CountsTokens):
            return Response(status_code=404)
        # SGLang's names; unlike SGLang, a request counts however it ended.
        counted = await self._provider.count_sampled()
        lines = (
            f"process_start_time_seconds {self._started_at}",
            f'sglang:http_requests_total{{endpoint="/generate",method="POST"}} {self._generations}',
            f"sglang:num_requests_total {self._generations}",
            f"sglang:generation_tokens_total {counted.tokens}",
        )
        return Response("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def _tokenize(self, request: Request) -> Response:
        ids = self._tokenizer.encode(decode(await request.body(), TokenizeRequest).prompt)
        length = self._provider.capabilities.context_length
        return _json({"tokens": ids, "count": len(ids), "max_model_len": length})

    @property
    def _guard(self) -> str | None:
        return self._provider.capabilities.repeat_guard


def _json(body: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _status(error: EngineError) -> int:
    return error.status if isinstance(error, EngineRejected | EngineUnavailable) else 500


def _error_body(error: EngineError) -> Json:
    kind = "invalid_request_error" if isinstance(error, EngineRejected) else error.code
    return {"error": {"message": error.message, "type": kind, "code": _status(error)}}


async def _answer_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return _json(_error_body(error), _status(error))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=_NOBODY_READS)
