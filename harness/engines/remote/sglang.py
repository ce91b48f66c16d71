"""SGLang server as a `TokenProvider`, through its native `/generate`: ids in, ids out.

Sampled logprobs are raw only with `SGLANG_RETURN_ORIGINAL_LOGPROB=1`. Entering measures this and refuses a server
without it, unless the caller states the other scale. `seed` needs `--enable-deterministic-inference`.
"""

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import msgspec

from harness.engines.base import Capabilities, EngineCount, EngineHealth, PauseMode
from harness.engines.remote.http_client import GATHER_S, HttpCall
from harness.engines.remote.in_flight import LiveRequest
from harness.engines.remote.metrics import count_sglang
from harness.engines.remote.provider import RemoteProvider
from harness.engines.remote.reply import Asked, fit_budget, verify_reply, verify_scores
from harness.engines.remote.served_model import ServedModel, find_model
from harness.engines.remote.sglang_wire import (
    Loads,
    ModelInfo,
    ServerInfo,
    SGLangReply,
    StreamedReply,
    UpdateAnswer,
    generate_body,
    read_guard,
    read_prompt_scores,
    read_reply,
    read_stream,
    score_body,
)
from harness.engines.remote.weight_change import require_fitting
from harness.errors import EngineError, EngineRejected, EngineReplyInvalid, EngineUnavailable
from harness.types import STREAM_INTERVAL, GenerationDelta, GenerationRequest, GenerationResult, PromptLogprobs

_MAX_TOP_LOGPROBS = 20
_CONTROL_S = 60.0
_WEIGHTS_S = 600.0
_HEALTH_S = 5.0
_PAUSED_STATUS = 503
_REPEATING_INTERVAL = 8  # tokens between two chunks for a reader, each of which repeats the output so far
_MOST_CHUNKS = 16  # of an answer that each of them repeats: half of it on average
# `retract`, not `in_place`: retracted requests can be aborted, the cache can be flushed, and requests continue under
# new weights with a cache those weights computed. It costs one prefill per request. An abort while retracted loses
# tokens not yet sent (`unheard_tokens`); ids, logprobs and spans still agree.
_PAUSES = {PauseMode.ABORT: "abort", PauseMode.KEEP: "retract"}


class SGLangTokenProvider(RemoteProvider):
    """Serves a SGLang worker, or another engine with its protocol (`engines.sglang_server`).

    See `RemoteProvider`. `url` must be the worker itself: routers drop request fields. `vocab_size` must be that of the
    weights: an id outside the vocabulary ends the server.
    """

    kind = "sglang"
    first_label = "default"
    scale_advice = (
        "start SGLang with SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, or state"
        " LogprobScale.AFTER_TEMPERATURE and sample at temperature 1"
    )

    _model: ServedModel | None = None
    """None before entry."""
    _server = ServerInfo(max_req_input_len=0)

    async def _generate(self, asked: Asked, live: LiveRequest) -> GenerationResult:
        request, moment = asked.request, self._served.asking()
        # Streamed, coarsely: a broken connection then loses no more than an interval. Other engines behind this
        # protocol stream every token, which costs more than what a break could lose.
        if self._comes_live(request) or (self._comes_in_pieces(request) and self._server.engine == "sglang"):
            result = await self._gather(asked, live)
        else:
            reply = await self._client.call(self._call_of(asked), SGLangReply)
            result = verify_reply(asked, read_reply(asked, reply))
        return self._learn_from(result, moment)

    async def _score(self, asked: Asked) -> PromptLogprobs:
        body, request_id = score_body(asked), asked.request.request_id
        call = HttpCall("POST", "/generate", self._generation_timeout_s, body, request_id=request_id)
        scored, tops, version = read_prompt_scores(asked, await self._client.call(call, SGLangReply))
        return verify_scores(asked, scored, version, tops)

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider.abort`; None also aborts other clients' requests."""
        told = await self._flight.tell_to_end(request_id)
        if request_id is None:
            await self._client.post("/abort_request", {"abort_all": True}, deadline_s=_CONTROL_S)
        elif any(live.sent_at is not None for live in told):
            await self._end_in_engine(request_id)
        await self._flight.tell_again(told)
        return len(told)

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider.pause`; in ABORT mode returns after every request has ended."""
        # Requests that arrive during a pause wait here: SGLang loses an abort of a request that it holds itself.
        self._flight.hold()
        await self._client.post("/pause_generation", {"mode": _PAUSES[mode]}, deadline_s=_CONTROL_S)

    async def resume(self) -> None:
        await self._change.require_settled()
        try:
            await self._client.post("/continue_generation", {}, deadline_s=_CONTROL_S)
        finally:
            # Even if the engine refused: it holds requests itself from now on, and they have a deadline there.
            self._flight.release()

    async def read_version(self) -> str:
        moment = self._served.asking()
        info = await self._client.get("/model_info", ModelInfo, deadline_s=_HEALTH_S)
        self._served.learn(info.weight_version, moment)
        return self._served.label

    async def is_paused(self) -> bool:
        """See `ChangingServer`; SGLang does not report other clients' pauses."""
        return self._flight.is_held

    async def require_fitting(self, path: Path) -> None:
        info = await self._client.get("/model_info", ModelInfo, deadline_s=_HEALTH_S)
        await asyncio.to_thread(require_fitting, Path(info.model_path), path)

    async def announce_change(self, label: str) -> None:
        # Other engines behind this protocol change label and weights in one step.
        if self._server.engine == "sglang":
            body = {"new_version": label, "abort_all_requests": False}
            await self._client.post("/update_weight_version", body, deadline_s=_CONTROL_S)

    async def load(self, path: Path, version: str) -> None:
        """See `ChangingServer`; the server itself flushes its cache and sets the label."""
        body = {"model_path": str(path), "weight_version": version, "flush_cache": True, "abort_all_requests": False}
        call = HttpCall("POST", "/update_weights_from_disk", _WEIGHTS_S, body)
        answer = await self._client.call(call, UpdateAnswer)
        if not answer.success:
            raise EngineRejected(f"{self._client.name} did not load the weights in {path}: {answer.message}")

    async def adopt(self, version: str) -> None:
        reported = await self.read_version()
        if reported != version:
            raise EngineReplyInvalid(
                f"{self._client.name} reports weight version {reported!r} after an update to {version!r}"
            )

    async def health(self) -> EngineHealth:
        """See `TokenProvider.health`; a server that is not ready for requests is paused."""
        try:
            # Never `/health`: it generates a token, so on a paused engine it fails after 20 s.
            loads = await self._client.get("/v1/loads", Loads, deadline_s=_HEALTH_S)
            ready = await self._client.ask(HttpCall("GET", "/ready", _HEALTH_S))
        except EngineError as error:
            return EngineHealth(
                ready=False, paused=self._flight.is_held, running=0, waiting=self._flight.waiting, detail=error.message
            )
        return EngineHealth(
            ready=True,
            paused=self._flight.is_held or ready.status == _PAUSED_STATUS,
            running=sum(load.num_running_reqs for load in loads.loads),
            waiting=sum(load.num_waiting_reqs for load in loads.loads) + self._flight.waiting,
            detail=f"{self._client.url} version {self._served.label}",
        )

    async def count_sampled(self) -> EngineCount:
        """See `CountsTokens`; needs `--enable-metrics`."""
        return await count_sglang(self._client)

    async def _read_guard(self, asked: Asked) -> str | None:
        return read_guard(asked, await self._client.call(self._call_of(asked), SGLangReply))

    async def _find_masks(self) -> int:
        return self._server.sampling_mask_max_tokens

    async def _connect(self) -> None:
        model = await find_model(self._client)
        self._server = await self._client.get("/server_info", ServerInfo, deadline_s=_CONTROL_S)
        # The longest accepted input plus one is the limit; `/server_info` reports a few tokens less than the context.
        usable = min(model.max_model_len, self._server.max_req_input_len + 1)
        self._model = msgspec.structs.replace(model, max_model_len=usable)
        self._join_ranks(map(str, range(self._server.dp_size)))

    def _describe(self) -> Capabilities:
        if self._model is None:
            raise EngineUnavailable(f"{self._client.name} is not connected; use the provider inside `async with`")
        return Capabilities(
            engine=self._server.engine,
            model=self._model.id,
            vocab_size=self._vocab_size,
            context_length=self._model.max_model_len,
            logprob_scale=self._scale,
            pause_modes=frozenset(PauseMode),
            max_top_logprobs=_MAX_TOP_LOGPROBS,
            follows_json_schema=self._server.grammar_backend != "none",
            can_update_weights=True,
            repeat_guard=self._guard,
            version=self._server.version,
            follows_scripts=self._follows_scripts,
            routed_experts=self._router,
            max_mask_ids=self._max_mask_ids,
        )

    def _prepare(self, request: GenerationRequest) -> Asked:
        # With `ignore_eos` SGLang ignores all stop ids.
        if request.params.ignore_eos and request.params.stop_token_ids:
            raise EngineRejected(
                f"{self._client.name} ignores stop_token_ids together with ignore_eos; ask for one of them"
            )
        is_guarded, rank = self._guard is not None, self._rank_of(request)
        name, router = self._client.name, None if request.rows_from is None else self._router
        asked = Asked(name, request, self._vocab_size, is_guarded=is_guarded, rank=rank, router=router)
        return fit_budget(self.capabilities, asked)

    def _call_of(self, asked: Asked, interval: int | None = None) -> HttpCall:
        body, request_id = generate_body(asked, interval=interval), asked.request.request_id
        timeout_s, row_bytes = self._generation_timeout_s, asked.row_bytes
        return HttpCall("POST", "/generate", timeout_s, body, request_id=request_id, row_bytes=row_bytes)

    async def _gather(self, asked: Asked, live: LiveRequest) -> GenerationResult:
        """Read the answer in pieces; report new ids to a live reader now and then."""
        # All is verified together at the end. If the request fails, the pieces that arrived are reported before the
        # error is raised.
        tell, reader = asked.request.on_delta, asked.request.on_ids if self._comes_live(asked.request) else None
        assert tell is not None
        call, streamed = self._call_of(asked, self._interval(asked.request)), StreamedReply(asked, self._served.label)
        decode = partial(self._client.decode, call, kind=SGLangReply)
        payloads: list[bytes] = []
        heard_bytes = 0

        async def hear() -> None:
            nonlocal heard_bytes
            live.heard.set()
            if reader is not None:
                size_bytes = sum(map(len, payloads))
                chunks = await self._client.apart(size_bytes, lambda: [*map(decode, payloads)])
                heard_bytes += size_bytes
                payloads.clear()
                for chunk in chunks:
                    streamed.add(chunk)
                reader(streamed.new_ids())

        def read() -> GenerationResult:
            reply = read_stream(asked, payloads, decode) if reader is None else streamed.whole()
            return verify_reply(asked, reply)

        try:
            await self._client.gather_events(call, payloads, hear, gather_s=math.inf if reader is None else GATHER_S)
            live.is_answered = True
            result = await self._client.apart(heard_bytes + sum(map(len, payloads)), read)
        except BaseException:  # cancellation too: the caller keeps what arrived
            with suppress(EngineError):  # the first error is raised; pieces before a bad one count
                for payload in payloads:
                    streamed.add(decode(payload))
            with suppress(EngineError):
                for delta in streamed.deltas():
                    tell(delta)
            raise
        tell(GenerationDelta(result.output_ids, result.logprobs, result.version_spans))
        return result

    def _comes_live(self, request: GenerationRequest) -> bool:
        # Every chunk would repeat prompt logprobs, so they come with the whole.
        is_wanted = request.on_ids is not None and request.prompt_logprobs_from is None
        return is_wanted and self._comes_in_pieces(request)

    async def _stream(self, asked: Asked, live: LiveRequest) -> AsyncGenerator[GenerationDelta | GenerationResult]:
        call = self._call_of(asked, 1)
        streamed, moment = StreamedReply(asked, self._served.label), self._served.asking()
        async with aclosing(self._client.events(call)) as events:
            async for payloads in events:
                for payload in payloads:
                    decode = partial(self._client.decode, call, payload, SGLangReply)
                    streamed.add(await self._client.apart(len(payload), decode))
                    delta = streamed.delta()
                    if delta is not None:
                        yield delta
        yield self._learn_from(verify_reply(asked, streamed.whole()), moment)

    def _interval(self, request: GenerationRequest) -> int:
        """Return the tokens between two chunks: few for a live reader, else enough to bound repetition."""
        # Every chunk repeats the scored input and, without `--incremental-streaming-output`, the output so far. In
        # tokens of the budget this is at most half of `_MOST_CHUNKS` for the output and 2 for the input, plus the input
        # in the first and last chunk.
        if self._comes_live(request):
            return 1 if self._server.incremental_streaming_output else _REPEATING_INTERVAL
        start = request.prompt_logprobs_from
        repeated = 0 if start is None else (request.input_ids.size - start) * _MOST_CHUNKS // 2
        if not self._server.incremental_streaming_output:
            repeated += request.params.max_new_tokens
        return max(STREAM_INTERVAL, repeated // _MOST_CHUNKS)

    async def _end_in_engine(self, request_id: str, /) -> None:
        await self._client.post("/abort_request", {"rid": request_id}, deadline_s=_CONTROL_S)
