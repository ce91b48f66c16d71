"""An engine server on loopback with a scripted engine inside: what the fakes of SGLang and vLLM have in common.

A `Lie` distorts what a server says about a generation or how it says it; the engine inside stays honest, so the truth
is known.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from aiohttp import ClientConnectionResetError, web

from harness.engines.scripted import ScriptedEngine
from harness.types import (
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    Json,
    SamplingParams,
    TokenIds,
    as_ids,
    as_logprobs,
)
from server_patch.force_tokens.script import read_script
from server_patch.repeat_terminate import RepeatTerminateConfig
from server_patch.repeat_terminate.attach import Guard, Watch
from tests.fake_engines.lies import STATUSES, Lie, Told

UNFIT_WEIGHTS = Path("/weights/that/do/not/fit")
"""A checkpoint that no server takes."""


class Fault(StrEnum):
    """What becomes of a control call."""

    REFUSED = "refused"
    """Answered with 500, and nothing done."""
    LOST = "lost"
    """Done, and answered with 500 all the same."""
    HANGS = "hangs"
    """Never answered, and nothing done."""


class Died(Exception):
    """The server is gone in the middle of a generation."""


class FakeServer:
    """What both servers have in common: lies, statuses, streams."""

    def __init__(
        self,
        engine: ScriptedEngine,
        *,
        divides_by_temperature: bool = False,
        repeat_guard: RepeatTerminateConfig | None = None,
        obeys: bool = False,
    ) -> None:
        self.engine = engine
        self.lie = Lie.NONE
        self.serves_models = True
        self.paths: list[str] = []
        """What was asked, in order."""
        self.posted: list[str] = []
        """Those of the same that were POSTs, which alone change anything."""
        self.bodies: list[Json] = []
        """Bodies of generations."""
        self.faults: dict[str, list[Fault | None]] = {}
        """By path, what becomes of the next POSTs there, in their order; None lets one through."""
        self.is_silent = False
        """Answers nothing with anything, like a core that loads weights."""
        self.holds: dict[str, asyncio.Event] = {}
        """By path, what POSTs there wait for before anything is done."""
        self.first_weights = "/weights/first"
        self.weights: str | None = self.first_weights
        """Where those came from that would sample the next token; None while nobody could tell."""
        self.sampled: list[tuple[str | None, set[str]]] = []
        """Of every generation, the weights that ended it, and the labels that were said of its tokens."""
        self.log: dict[str, list[int]] = {}
        """By request, the tokens that were sampled for it: written where they are sampled, heard or not. A request that
        its client took back is not in here."""
        self.dies_after: list[int] = []
        """Of the next generations, the tokens after which the server dies. It is there again at once; what it worked
        on, and had not sent, is gone."""
        self.has_stale_cache = False
        """Weights were loaded, and the keys and values of those before them were not thrown away since."""
        self.change_rows: Callable[[npt.NDArray[Any]], npt.NDArray[Any] | None] = lambda rows: rows
        """What it returns in place of the routed experts."""
        self.most_candidates = 4096
        """Of a token, in SGLang's sampling masks; 0 on a server that knows none."""
        self.over_masks = 0
        """Logprobs over them that SGLang returns; 0 for one of each token."""
        self.returns_masks = False
        """vLLM with `--return-sampling-mask`."""
        self.change_masks: Callable[[list[list[int]]], list[list[int]]] = lambda masks: masks
        """What it returns in place of the sampling masks."""
        self.honors_offset = True
        """Returns the rows from where it was asked to."""
        self.url = ""
        self.api_key = ""
        """Wanted from whoever asks for anything but `/health`, when it is not empty."""
        self.keys: list[str] = []
        """What was shown as one, in order."""
        self._divides = divides_by_temperature
        self.obeys = obeys
        """Says the `force_ids` of a request, as the engines of lanes do; a server that others start ignores them."""
        self.repeat_guard = repeat_guard
        """Can be taken away while it serves, as by a restart."""
        self.started_at = time.time()
        """Another one is another process."""
        self.ranks = 1
        """Data-parallel ranks, each with a cache of its own."""
        self.asked_ranks: list[int | None] = []
        """Of every generation, the rank that was asked for."""
        self.others = 0
        """Requests that could sample, and that somebody else sent."""
        self.uncounted: list[int] = []
        """Of requests that the counters of `/metrics` leave out: their tokens."""
        self.write_series: Callable[[str], str] = str
        """How `/metrics` writes a series, given the plainest way."""
        self._closing = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        """The routes of the server."""
        raise NotImplementedError

    def close(self) -> None:
        """Let handlers that hang end."""
        self._closing.set()

    def app(self) -> web.Application:
        """The server as an application."""
        app = web.Application(client_max_size=1 << 26, middlewares=[self._remember])
        app.add_routes([*self.routes(), web.get("/v1/models", self._models), web.post("/tokenize", self._tokenize)])
        return app

    @web.middleware
    async def _remember(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.keys.append(request.headers.get("authorization", ""))
        if self.api_key and self.keys[-1] != f"Bearer {self.api_key}" and request.path != "/health":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.paths.append(request.path)
        if self.is_silent:
            return web.Response(status=503)
        if request.method != "POST":
            return await handler(request)
        self.posted.append(request.path)
        if hold := self.holds.get(request.path):
            await hold.wait()
        fault = next(iter(self.faults.get(request.path, ())), None)
        if request.path in self.faults:
            del self.faults[request.path][:1]
        if fault is Fault.HANGS:
            await self._closing.wait()
        try:
            answer = None if fault in (Fault.REFUSED, Fault.HANGS) else await handler(request)
        except Died:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if answer is None or fault is Fault.LOST:
            return web.json_response({"error": {"message": f"so {fault} it was", "code": 500}}, status=500)
        return answer

    def _metrics_page(self, *series: str) -> web.Response:
        return web.Response(text="\n".join(["# HELP x", *map(self.write_series, series), ""]))

    async def _sampled_tokens(self) -> int:
        """The tokens that the counters of `/metrics` show."""
        return (await self.engine.count_sampled()).tokens - sum(self.uncounted)

    async def _models(self, request: web.Request) -> web.Response:
        capabilities = self.engine.capabilities
        card = {"id": capabilities.model, "max_model_len": capabilities.context_length, "root": self.first_weights}
        cards = [card, {"id": "adapter", "max_model_len": 1}] if self.serves_models else []
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        ids = self.engine._tokenizer.encode((await request.json())["prompt"])
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def _refusal(self) -> web.Response | None:
        if self.lie is Lie.HANG:
            await self._closing.wait()
        if status := STATUSES.get(self.lie):
            return web.json_response({"error": {"message": "so says the server", "code": status}}, status=status)
        return None

    async def _sampled(
        self, request: GenerationRequest, interval: int = 1
    ) -> AsyncGenerator[GenerationDelta | GenerationResult]:
        """The engine's stream, its first token at once and then `interval` by `interval`. Raises `Died`."""
        log = self.log[request.request_id] = []
        dies_after = self.dies_after.pop(0) if self.dies_after else None
        unsent: list[GenerationDelta] = []
        async with aclosing(self.engine.stream(request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, GenerationResult):
                    yield piece
                    return
                log += piece.output_ids.tolist()
                if dies_after is not None and len(log) >= dies_after:
                    raise Died
                unsent.append(piece)
                size = sum(each.output_ids.size for each in unsent)
                if size == len(log) or size >= interval:
                    ids, logprobs = ([each.output_ids for each in unsent], [each.logprobs for each in unsent])
                    yield GenerationDelta(as_ids(np.concatenate(ids)), as_logprobs(np.concatenate(logprobs)))
                    unsent.clear()

    async def _whole(self, request: GenerationRequest) -> GenerationResult:
        """The engine's result. Raises `Died`."""
        if not self.dies_after:
            result = await self.engine.generate(request)
            self.log[request.request_id] = result.output_ids.tolist()
            return result
        [*_, last] = [piece async for piece in self._sampled(request)]
        assert isinstance(last, GenerationResult)
        return last

    def _note(self, told: Told) -> None:
        self.sampled.append((self.weights, {span["version"] for span in told.spans}))

    def _script(self, arguments: object) -> TokenIds | None:
        """The ids that a request is to say, as the plugins read them."""
        script = read_script(arguments) if self.obeys else ()
        return as_ids(script) if script else None

    def _watch(self, prompt_ids: Sequence[int], arguments: object) -> Watch | None:
        """The guard's view of a request, as the plugins have it."""
        config = self.repeat_guard
        return Guard(config, config.digest()).watch(prompt_ids, arguments) if config else None

    def _guarded(self, told: Told, watch: Watch | None) -> Told:
        """The answer with what the guard does to it."""
        if watch is None or self.repeat_guard is None:
            return told
        hit = watch.hit(told.ids)
        if watch.is_probe:
            told.cut(1, "length")
            told.probed = self.repeat_guard.digest()
        elif hit is not None and hit < len(told.ids):
            told.cut(hit, "repeat")
        told.guarded = int(told.finish == "repeat")
        return told

    def _scale(self, params: SamplingParams) -> float:
        return params.temperature if self._divides and params.temperature else 1.0

    def _content(self, body: Json) -> bytes:
        """`body` as bytes, spoilt as told."""
        match self.lie:
            case Lie.NOT_UTF8:
                return json.dumps({**body, "text": "?"}).encode().replace(b'"?"', b'"\xff\xfe"')
            case Lie.NOT_JSON:
                return b"<html>Bad Gateway</html>"
            case Lie.WRONG_SHAPE:
                return b'{"choices": 7, "meta_info": [], "output_ids": "x"}'
            case Lie.ERROR_EVENT:
                return json.dumps({"error": {"message": "too busy", "code": 503}}).encode()
            case _:
                return json.dumps(body).encode()

    async def _answer(self, request: web.Request, body: Json) -> web.StreamResponse:
        """A whole answer."""
        content = self._content(body)
        if self.lie is Lie.TRUNCATED:
            return await self._cut(request, content)
        return web.Response(body=content, content_type="application/json")

    async def _cut(self, request: web.Request, content: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": str(len(content))})
        await response.prepare(request)
        await response.write(content[: len(content) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    async def _stream(self, request: web.Request, chunks: AsyncGenerator[Json]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ClientConnectionResetError):  # the reader has gone; what it wanted continues until it is aborted
            async with aclosing(chunks):
                async for chunk in chunks:
                    content = self._content(chunk)
                    if self.lie is Lie.TRUNCATED:
                        await response.write(b"data: " + content[: len(content) // 2])
                        return response
                    await response.write(b": a comment\nevent: x\ndata: " + content + b"\r\n\r\n")
            await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def serving(fake: FakeServer, *, notices_disconnects: bool) -> AsyncIterator[str]:
    """The base address of `fake`, on loopback."""
    runner = web.AppRunner(fake.app(), handler_cancellation=notices_disconnects, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        fake.url = f"http://{host}:{port}"
        yield fake.url
    finally:
        fake.close()
        await fake.engine.resume()
        await fake.engine.abort(None)
        await runner.cleanup()
