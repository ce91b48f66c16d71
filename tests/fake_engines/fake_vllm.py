"""vLLM on loopback, as the real server was seen: two token endpoints, prefixed ids, control verbs in dev mode."""

from base64 import b64encode
from collections.abc import AsyncGenerator
from io import BytesIO
from typing import Any

import numpy as np
from aiohttp import web

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptedEngine
from harness.top_logprobs import TopLogprobs
from harness.types import GenerationDelta, GenerationRequest, GenerationResult, Json, SamplingParams, as_ids
from server_patch.repeat_terminate.attach import Watch
from server_patch.repeat_terminate.signals import MARK, VLLM_FINISH, probe_answer
from tests.fake_engines.fake_server import UNFIT_WEIGHTS, FakeServer
from tests.fake_engines.lies import Lie, Told


class FakeVLLM(FakeServer):
    """vLLM 0.32: two token endpoints, prefixed ids, control verbs in dev mode."""

    def __init__(
        self, engine: ScriptedEngine, *, scale_out: bool = True, dev_mode: bool = True, **options: Any
    ) -> None:
        super().__init__(engine, **options)
        self._scale_out = scale_out
        self._dev_mode = dev_mode
        self._paused = False
        self.flushes = True
        """Throws its cache away when it is asked to."""
        self.loaded: list[str] = []
        """Paths that were loaded, in order."""

    def routes(self) -> list[web.RouteDef]:
        token = self._generate if self._scale_out else self._disabled
        routes = [
            web.post("/v1/completions", self._generate),
            web.post("/inference/v1/generate", token),
            web.post("/inference/v1/abort_requests", self._abort if self._scale_out else self._disabled),
            web.get("/metrics", self._metrics),
            web.get("/version", self._version),
        ]
        return routes + self._dev_routes() if self._dev_mode else routes

    def _dev_routes(self) -> list[web.RouteDef]:
        return [
            web.post("/pause", self._pause),
            web.post("/resume", self._resume),
            web.get("/is_paused", self._is_paused),
            web.post("/abort_requests", self._abort),
            web.get("/weight_info", self._weight_info),
            web.post("/collective_rpc", self._collective_rpc),
            web.post("/reset_prefix_cache", self._reset),
            web.post("/update_weight_version", self._update_version),
        ]

    async def _disabled(self, request: web.Request) -> web.Response:
        message = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
        return web.json_response({"error": {"message": message, "type": "PermissionDeniedError"}}, status=403)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if "request_id" not in body:
            return web.json_response({"error": {"message": "field required", "code": 400}}, status=400)
        self.bodies.append(body)
        sampling = body.get("sampling_params", {})
        if self.returns_masks and not (sampling["top_k"] > 0 and sampling["temperature"] > 0):
            message = "sampling distribution replay requires top_k > 0 and temperature > 0"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        rank = request.headers.get("x-data-parallel-rank")
        self.asked_ranks.append(None if rank is None else int(rank))
        if refusal := await self._refusal():
            return refusal
        wire = _GenerateWire(self, body) if "token_ids" in body else _CompletionsWire(self, body)
        if body.get("stream"):
            return await self._stream(request, self._chunks(wire, request))
        result = await self._whole(wire.generation(request))
        return await self._answer(request, wire.whole(await self._told(wire, result)))

    async def _told(self, wire: Any, result: GenerationResult) -> Told:
        told = Told.truth(result, self.engine.weight_version, self._scale(wire.params()))
        self._note(told)
        self._guarded(told, self._watched(wire))
        if told.probed:
            told.finish, told.matched = VLLM_FINISH, probe_answer(told.probed)
        elif told.guarded:
            told.finish, told.matched = VLLM_FINISH, MARK
        return told.distorted(self.lie)

    def _watched(self, wire: Any) -> Watch | None:
        return self._watch(wire.prompt(), wire.extra_arguments())

    async def _chunks(self, wire: Any, request: web.Request) -> AsyncGenerator[Json]:
        sent = 0
        watch, ids = self._watched(wire), []
        async for piece in self._sampled(wire.generation(request), wire.sampling.get("stream_interval", 1)):
            if isinstance(piece, GenerationResult):
                told = await self._told(wire, piece)
                yield wire.chunk(told, sent)
                yield wire.usage_chunk(told)
            elif self.lie is Lie.NONE:
                ids += piece.output_ids.tolist()
                if watch and (watch.is_probe or watch.hit(ids)):
                    continue
                yield wire.delta(piece)
                sent += piece.output_ids.size

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json()).get("request_ids")
        if not ids:
            return web.json_response({"aborted": await self.engine.abort(None)})
        for name in ids:
            if name.startswith("generate-tokens-"):
                await self.engine.abort(name.removeprefix("generate-tokens-"))
            elif name.startswith("cmpl-") and name.endswith("-0"):
                await self.engine.abort(name.removeprefix("cmpl-").removesuffix("-0"))
        return web.json_response({"status": "aborted", "aborted": len(ids)})

    async def _pause(self, request: web.Request) -> web.Response:
        self._paused = True
        await self.engine.pause(PauseMode(request.query["mode"]))
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._paused = False
        await self.engine.resume()
        return web.json_response({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._paused})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.engine.weight_version})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        path = (await request.json())["kwargs"]["weights_path"]
        self.loaded.append(path)
        self.has_stale_cache = True
        if path == str(UNFIT_WEIGHTS):
            self.weights = None
            return web.json_response({"error": {"message": "shapes differ", "code": 500}}, status=500)
        self.weights = path
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request) -> web.Response:
        if not self.flushes:
            return web.json_response({"error": {"message": "blocks are in use", "code": 500}}, status=500)
        self.has_stale_cache = False
        return web.Response()

    async def _update_version(self, request: web.Request) -> web.Response:
        version = (await request.json())["new_version"]
        self.engine.relabel(version)
        return web.json_response({"success": True, "new_version": version})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _metrics(self, request: web.Request) -> web.Response:
        running = (await self.engine.health()).running
        asked = len(self.bodies) + self.others
        return self._metrics_page(
            f"process_start_time_seconds {self.started_at}",
            *(f'vllm:num_requests_running{{engine="{rank}"}} {0 if rank else running}.0' for rank in range(self.ranks)),
            'vllm:num_requests_waiting{engine="0"} 0.0',
            f'http_requests_total{{handler="/inference/v1/generate",method="POST",status="2xx"}} {asked}.0',
            'http_requests_total{handler="/inference/v1/generate",method="POST",status="4xx"} 3.0',
            'http_requests_total{handler="/pause",method="POST",status="2xx"} 7.0',
            f'vllm:generation_tokens_total{{engine="0"}} {await self._sampled_tokens()}.0',
        )


class _Wire:
    """One of vLLM's endpoints, seen from the server."""

    def __init__(self, server: FakeVLLM, body: Json) -> None:
        self.server = server
        self.body = body
        self.sampling: Json = body.get("sampling_params", body)

    def wants_prompt(self) -> bool:
        return "prompt_logprobs" in self.sampling

    def params(self) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.sampling["max_tokens"],
            temperature=self.sampling["temperature"],
            stop=tuple(self.sampling["stop"]),
            stop_token_ids=tuple(self.sampling["stop_token_ids"]),
            top_logprobs=self.sampling["logprobs"],
            sampling_mask=self.server.returns_masks,
        )

    def generation(self, request: web.Request) -> GenerationRequest:
        session_id = request.headers.get("x-session-id")
        return GenerationRequest(
            as_ids(self.prompt()),
            self.params(),
            self.body["request_id"],
            session_id,
            prompt_logprobs_from=1 if self.wants_prompt() else None,
            script_ids=self.server._script(self.extra_arguments()),
            rows_from=self.sampling.get("routed_experts_prompt_start", 0) if self.server.honors_offset else 0,
        )

    def prompt(self) -> list[int]:
        return self.body.get("token_ids") or self.body["prompt"]

    def extra_arguments(self) -> Json | None:
        return self.sampling.get("extra_args") or self.body.get("vllm_xargs")

    def usage(self, told: Told) -> Json:
        return {"prompt_tokens": told.prompt_count, "completion_tokens": told.count, "total_tokens": 0}

    def stop_reason(self, told: Told) -> int | str | None:
        return None if told.matched == 2 else told.matched

    def prompt_entries(self, told: Told) -> list[Json | None] | None:
        if not self.wants_prompt() or self.server.lie is Lie.PROMPT_MISSING:
            return None
        pairs = zip(told.prompt_named, told.prompt_logprobs, strict=False)
        return [None, *({str(token): {"logprob": logprob, "rank": 1}} for token, logprob in pairs)]


class _GenerateWire(_Wire):
    def whole(self, told: Told) -> Json:
        prompt = self.prompt_entries(told)
        return self.chunk(told, 0) | {"usage": self.usage(told), "prompt_logprobs": prompt}

    def chunk(self, told: Told, sent: int) -> Json:
        tops = [[]] * len(told.named) if told.top is None else _rows(told.top)
        content = [
            {
                "token_id": token,
                "logprob": logprob,
                "top_logprobs": [{"token_id": other, "logprob": value} for other, value in top],
            }
            for token, logprob, top in zip(told.named, told.logprobs, tops, strict=False)
        ]
        choice = {
            "index": 0,
            "token_ids": told.ids[sent:],
            "finish_reason": told.finish or None,
            "stop_reason": self.stop_reason(told),
            "logprobs": None if self.server.lie is Lie.MISSING_LOGPROBS else {"content": content[sent:]},
            "weight_versions": told.spans or None,
        }
        if told.masks is not None:
            choice["sampling_mask"] = self.server.change_masks(told.masks)
        if told.rows is not None and (rows := self.server.change_rows(told.rows)) is not None:
            np.save(file := BytesIO(), rows)
            choice["routed_experts"] = b64encode(file.getvalue()).decode()
        return {"request_id": f"generate-tokens-{told.rid}", "choices": [choice]}

    def delta(self, piece: GenerationDelta) -> Json:
        pairs = zip(piece.output_ids.tolist(), piece.logprobs.tolist(), strict=True)
        content = [{"token_id": token, "logprob": logprob, "top_logprobs": []} for token, logprob in pairs]
        choice = {"token_ids": piece.output_ids.tolist(), "finish_reason": None, "logprobs": {"content": content}}
        return {"request_id": f"generate-tokens-{self.body['request_id']}", "choices": [choice]}

    def usage_chunk(self, told: Told) -> Json:
        return {"request_id": f"generate-tokens-{told.rid}", "choices": [], "usage": self.usage(told)}


class _CompletionsWire(_Wire):
    def whole(self, told: Told) -> Json:
        return self.chunk(told, 0) | {"usage": self.usage(told)}

    def chunk(self, told: Told, sent: int) -> Json:
        tops = None if told.top is None else [{f"token_id:{a}": b for a, b in row} for row in _rows(told.top)][sent:]
        logprobs = {
            "tokens": [f"token_id:{token}" for token in told.named[sent:]],
            "token_logprobs": told.logprobs[sent:],
            "top_logprobs": tops,
        }
        choice = {
            "text": "",
            "token_ids": told.ids[sent:],
            "finish_reason": told.finish or None,
            "stop_reason": self.stop_reason(told),
            "logprobs": None if self.server.lie is Lie.MISSING_LOGPROBS else logprobs,
            "prompt_logprobs": self.prompt_entries(told),
        }
        return {"id": f"cmpl-{told.rid}", "choices": [choice]}

    def delta(self, piece: GenerationDelta) -> Json:
        names = [f"token_id:{token}" for token in piece.output_ids.tolist()]
        logprobs = {"tokens": names, "token_logprobs": piece.logprobs.tolist(), "top_logprobs": None}
        choice = {"text": "", "token_ids": piece.output_ids.tolist(), "finish_reason": None, "logprobs": logprobs}
        return {"id": f"cmpl-{self.body['request_id']}", "choices": [choice]}

    def usage_chunk(self, told: Told) -> Json:
        return {"id": f"cmpl-{told.rid}", "choices": [], "usage": self.usage(told)}


def _rows(top: TopLogprobs) -> list[list[tuple[int, float]]]:
    return [
        list(zip(ids.tolist(), values.tolist(), strict=True)) for ids, values in zip(top.ids, top.logprobs, strict=True)
    ]
