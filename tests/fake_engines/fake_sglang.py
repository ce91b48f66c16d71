"""SGLang on loopback, as the real server was seen: null entries, cumulative streams, a gate that loses aborts."""

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from harness.engines.base import PauseMode
from harness.engines.scripted import ScriptedEngine
from harness.types import GenerationDelta, GenerationRequest, GenerationResult, Json, SamplingParams, as_ids
from server_patch.repeat_terminate.attach import Watch
from server_patch.repeat_terminate.signals import SGLANG_MATCHED
from tests.fake_engines.fake_server import UNFIT_WEIGHTS, FakeServer
from tests.fake_engines.lies import Lie, Told


class FakeSGLang(FakeServer):
    """SGLang 0.5.23: `rid`, cumulative or incremental streams, a gate that loses aborts."""

    def __init__(
        self, engine: ScriptedEngine, *, incremental: bool = False, repeats_last_id: bool = False, **options: Any
    ) -> None:
        super().__init__(engine, **options)
        self._incremental = incremental
        self._repeats_last_id = repeats_last_id
        self._gate = asyncio.Event()
        self._gate.set()
        self._held: set[str] = set()
        self._retracts = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.post("/pause_generation", self._pause),
            web.post("/continue_generation", self._continue),
            web.post("/update_weights_from_disk", self._update),
            web.post("/update_weight_version", self._update_version),
            web.get("/model_info", self._model_info),
            web.get("/server_info", self._server_info),
            web.get("/v1/loads", self._loads),
            web.get("/ready", self._ready),
            web.get("/metrics", self._metrics),
        ]

    def close(self) -> None:
        super().close()
        self._gate.set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.asked_ranks.append(body.get("routed_dp_rank"))
        await self._pass_gate(body["rid"])
        if refusal := await self._refusal():
            return refusal
        if len(body["input_ids"]) > self.engine.capabilities.context_length - 6:
            return web.json_response({"error": {"message": "the input is too long"}}, status=400)
        if body["sampling_params"]["max_new_tokens"] == 0:
            return await self._answer(request, await self._scores(body))
        if body.get("stream"):
            return await self._stream(request, self._chunks(body))
        result = await self._whole(self._generation(body))
        return await self._finished(request, self._told(body, result))

    async def _finished(self, request: web.Request, told: Told) -> web.StreamResponse:
        if told.status is not None:
            return web.json_response({"error": {"message": "Request running timeout reached."}}, status=told.status)
        return await self._answer(request, self._body(told))

    async def _pass_gate(self, rid: str) -> None:
        self._held.add(rid)
        await self._gate.wait()
        self._held.discard(rid)

    def _generation(self, body: Json) -> GenerationRequest:
        start = body["logprob_start_len"]
        return GenerationRequest(
            as_ids(body["input_ids"]),
            self._params(body),
            body["rid"],
            prompt_logprobs_from=None if start < 0 else start + 1,
            script_ids=self._script(body["sampling_params"].get("custom_params")),
            rows_from=self._rows_from(body),
        )

    def _rows_from(self, body: Json) -> int | None:
        if not body.get("return_routed_experts"):
            return None
        return body["routed_experts_start_len"] if self.honors_offset else 0

    def _params(self, body: Json) -> SamplingParams:
        sampling = body["sampling_params"]
        return SamplingParams(
            max_new_tokens=sampling["max_new_tokens"],
            temperature=sampling["temperature"],
            stop=tuple(sampling.get("stop", ())),
            stop_token_ids=tuple(sampling.get("stop_token_ids", ())),
            top_logprobs=body.get("top_logprobs_num", 0),
            sampling_mask=body.get("return_sampling_mask", False) and self._takes_masks(sampling["top_k"]),
        )

    def _takes_masks(self, top_k: int) -> bool:
        # As the scheduler of SGLang 0.5.23 requires.
        assert 1 <= top_k <= self.most_candidates, f"top_k={top_k}"
        return True

    def _told(self, body: Json, result: GenerationResult) -> Told:
        told = Told.truth(result, self.engine.weight_version, self._scale(self._params(body)))
        self._note(told)
        self._guarded(told, self._watched(body)).distorted(self.lie)
        start = body["logprob_start_len"]
        if start >= 0 and self.lie is not Lie.PROMPT_MISSING:
            told.prompt_named.insert(0, body["input_ids"][start])
        return told

    def _watched(self, body: Json) -> Watch | None:
        return self._watch(body["input_ids"], body["sampling_params"].get("custom_params"))

    async def _scores(self, body: Json) -> Json:
        start = body["logprob_start_len"] + 1
        ids = as_ids(body["input_ids"])
        scored = await self.engine.score(ids, start=start)
        result = GenerationResult(
            body["rid"], ids, as_ids([]), scored.logprobs[:0], "length", (), prompt_logprobs=scored
        )
        return self._body(self._told(body, result))

    async def _chunks(self, body: Json) -> AsyncGenerator[Json]:
        said: list[Told] = []
        sent = 0
        watch = self._watched(body)
        interval = body["sampling_params"].get("stream_interval", 1)
        async for piece in self._sampled(self._generation(body), interval):
            if isinstance(piece, GenerationResult):
                told = self._told(body, piece)
                if self._retracts and told.finish == "abort" and sent:
                    told.retract(sent)
                repeated = 1 if self._repeats_last_id and sent else 0
                yield self._body(told, sent - repeated if self._incremental else 0)
            elif self.lie is Lie.NONE:
                told = self._partial(body, piece, said[-1] if said else None)
                if watch and (watch.is_probe or watch.hit(told.ids)):
                    continue
                said.append(told)
                yield self._body(told, sent if self._incremental else 0)
                sent = told.count

    def _partial(self, body: Json, delta: GenerationDelta, before: Told | None) -> Told:
        ids = (before.ids if before else []) + delta.output_ids.tolist()
        logprobs = (before.logprobs if before else []) + delta.logprobs.tolist()
        size = len(body["input_ids"])
        return Told(body["rid"], ids, list(ids), logprobs, len(ids), size, "", None, [], self.engine.weight_version)

    def _body(self, told: Told, sent: int = 0) -> Json:
        """The reply; the first `sent` tokens are left out of its lists."""
        entries = [[logprob, token, None] for logprob, token in zip(told.logprobs, told.named, strict=True)]
        last = self.engine.capabilities.vocab_size - 1  # which SGLang names 0
        prompt = [
            [logprob, 0 if token == last else token, None]
            for logprob, token in zip([None, *told.prompt_logprobs], told.prompt_named, strict=False)
        ]
        meta = {
            "id": told.rid,
            "finish_reason": _sglang_finish(told),
            "prompt_tokens": told.prompt_count,
            "completion_tokens": told.count,
            "cached_tokens": 3,
            "weight_version": told.version,
            "output_token_logprobs": entries[sent:],
            "input_token_logprobs": prompt,
            "e2e_latency": 0.5,
            "output_top_logprobs": _sglang_top(told)[sent:],
        }
        if told.prompt_count is None:
            del meta["prompt_tokens"], meta["cached_tokens"]
        if told.finish:
            meta["weight_versions"] = told.spans
            if told.rows is not None and (rows := self.change_rows(told.rows)) is not None:
                meta["routed_experts"] = b64encode(rows.astype("<i4").tobytes()).decode()
        if told.masks is not None:
            meta["output_token_sampling_mask"] = self.change_masks(told.masks)
            meta["output_token_sampling_logprobs"] = [-0.125] * (self.over_masks or len(told.ids))
        if self.lie is Lie.MISSING_LOGPROBS:
            del meta["output_token_logprobs"]
        return {"text": "", "output_ids": told.ids[sent:], "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all"):
            await self.engine.abort(None)
        elif body["rid"] not in self._held:
            await self.engine.abort(body["rid"])
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        self._gate.clear()
        if (await request.json()).get("mode", "abort") == "abort":
            await self.engine.abort(None)
        else:
            self._retracts = True
            await self.engine.pause(PauseMode.KEEP)
        return web.json_response({"status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        self._gate.set()
        self._retracts = False
        await self.engine.resume()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model_path"] == str(UNFIT_WEIGHTS):
            self.weights = None
            return web.json_response({"success": False, "message": "shapes differ"}, status=400)
        if body.get("abort_all_requests"):
            await self.engine.abort(None)
        self.weights = body["model_path"]
        if version := body.get("weight_version"):
            self.engine.relabel(version)
        self.has_stale_cache = not body.get("flush_cache", True)
        return web.json_response({"success": True, "message": "done", "num_paused_requests": 0})

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("abort_all_requests", True):
            await self.engine.abort(None)
        self.engine.relabel(body["new_version"])
        return web.json_response({"success": True, "message": "done", "new_version": body["new_version"]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.first_weights, "weight_version": self.engine.weight_version})

    async def _server_info(self, request: web.Request) -> web.Response:
        longest = self.engine.capabilities.context_length - 6
        told = {"version": "0.5.23", "max_req_input_len": longest, "incremental_streaming_output": self._incremental}
        return web.json_response(told | {"dp_size": self.ranks, "sampling_mask_max_tokens": self.most_candidates})

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._gate.is_set() else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        asked = len(self.bodies) + self.others
        return self._metrics_page(
            f'sglang:startup_time_seconds{{phase="tokenizer_e2e",priority=""}} {self.started_at}',
            f'sglang:http_requests_total{{endpoint="/generate",method="POST"}} {asked}.0',
            'sglang:http_requests_total{endpoint="/abort_request",method="POST"} 7.0',
            f'sglang:num_requests_total{{is_streaming="false",priority=""}} {asked - len(self.uncounted)}.0',
            f'sglang:generation_tokens_total{{is_streaming="false",priority=""}} {await self._sampled_tokens()}.0',
        )

    async def _loads(self, request: web.Request) -> web.Response:
        health = await self.engine.health()
        load = {"dp_rank": 0, "num_running_reqs": health.running, "num_waiting_reqs": len(self._held)}
        return web.json_response({"version": "0.5.23", "loads": [load]})


def _sglang_finish(told: Told) -> Json | None:
    finish = _sglang_reason(told)
    if finish is None or told.guarded is None:
        return finish
    return finish | {"repeat_terminate": told.guarded} | ({"repeat_probe": told.probed} if told.probed else {})


def _sglang_reason(told: Told) -> Json | None:
    match told.finish:
        case "":
            return None
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": told.status, "err_type": None}
        case "length":
            return {"type": "length", "length": told.count}
        case "repeat":
            return {"type": "length", "length": told.count, "matched": SGLANG_MATCHED}
        case _:
            return {"type": told.finish, "matched": told.matched}


def _sglang_top(told: Told) -> list[list[list[Any]]]:
    if told.top is None:
        return []
    rows = zip(told.top.ids.tolist(), told.top.logprobs.tolist(), strict=True)
    return [[[logprob, token, None] for token, logprob in zip(ids, values, strict=True)] for ids, values in rows]
