"""vLLM server as a `TokenProvider`: `/inference/v1/generate` if the server has it, else `/v1/completions`.

The endpoint and dev mode (`VLLM_SERVER_DEV_MODE=1`: pause, resume, weights) are detected at entry and stated in
`capabilities` and `health`. Priorities are unused: their sign differs between engines.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from harness.engines.base import Capabilities, EngineCount, EngineHealth, LogprobScale, PauseMode
from harness.engines.recorded_rows import MAX_MASK_IDS
from harness.engines.remote.http_client import GATHER_S, HttpCall
from harness.engines.remote.in_flight import LiveRequest
from harness.engines.remote.metrics import Metrics, count_vllm
from harness.engines.remote.reply import Asked, fit_budget, verify_reply, verify_scores
from harness.engines.remote.served_model import ServedModel, find_model
from harness.engines.remote.vllm_control import MISSING, VersionAnswer, VLLMControl
from harness.engines.remote.vllm_wire import (
    CompletionsApi,
    GenerateApi,
    StreamedPieces,
    TokenApi,
    VLLMPiece,
    bound_candidates,
    read_guard,
    read_piece,
)
from harness.engines.remote.weight_change import Unlabeled
from harness.errors import EngineConnectionLost, EngineError, EngineRejected, EngineReplyInvalid, EngineUnavailable
from harness.types import (
    STREAM_INTERVAL,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    SamplingParams,
    as_ids,
    as_logprobs,
)

_MAX_TOP_LOGPROBS = 19  # the server's default limit of 20, less the sampled token that takes one place
_ONE_CANDIDATE = SamplingParams(1, top_k=1, ignore_eos=True)
_ENTRY_BYTES = 50  # of a reply, for each token
_PROBE_S = 60.0
_HEALTH_S = 5.0
_LAST_LOOK_S = 2.0
_RUNNING = "vllm:num_requests_running"


class _Offer(NamedTuple):
    model: ServedModel
    api: TokenApi
    version: str


class VLLMTokenProvider(VLLMControl):
    """Serves one vLLM server; see `RemoteProvider` for the arguments."""

    scale_advice = "start vLLM with --logprobs-mode raw_logprobs, which is its default"

    _entered_offer: _Offer | None = None
    """None before entry."""
    _scorings_sent = 0
    _scorings_answered = 0

    async def _generate(self, asked: Asked, live: LiveRequest) -> GenerationResult:
        # A stream carries no prompt logprobs.
        if self._comes_in_pieces(asked.request) and asked.request.prompt_logprobs_from is None:
            return await self._gather(asked, live)
        return await self._whole_result(asked)

    async def _score(self, asked: Asked) -> PromptLogprobs:
        # One token is sampled, and discarded.
        self._scorings_sent += 1
        piece, label = await self._whole(asked)
        self._scorings_answered += 1
        reply = read_piece(asked, self._offer.api, piece, label)
        scored = reply.prompt_scored
        if scored is None:
            raise EngineReplyInvalid(f"{asked.name}: expected prompt_logprobs, got none")
        size_bytes = _ENTRY_BYTES * len(scored) * (1 + asked.request.params.top_logprobs)
        return await self._client.apart(
            size_bytes, lambda: verify_scores(asked, scored, reply.version, reply.prompt_top)
        )

    async def health(self) -> EngineHealth:
        try:
            metrics = await self._metrics()
            running, waiting = metrics.total(_RUNNING), metrics.total("vllm:num_requests_waiting")
            is_paused = await self.is_paused()
        except EngineError as error:
            return EngineHealth(ready=False, paused=False, running=0, waiting=0, detail=error.message)
        mode = "dev mode" if self._has_dev_mode else "no dev mode"
        return EngineHealth(
            ready=True,
            paused=is_paused,
            running=running,
            waiting=waiting,
            detail=f"{self._client.url} {self._offer.api.path}, {mode}, version {self._served.label}",
        )

    async def count_sampled(self) -> EngineCount:
        return await count_vllm(self._client, self._scorings_answered, self._scorings_sent)

    async def _read_guard(self, asked: Asked) -> str | None:
        reply = await self._client.call(self._call_of(asked), self._offer.api.kind)
        return read_guard(self._offer.api.piece(asked, reply))

    @property
    def _offer(self) -> _Offer:
        if self._entered_offer is None:
            raise EngineUnavailable(f"{self._client.name} is not connected; use the provider inside `async with`")
        return self._entered_offer

    async def _find_masks(self) -> int:
        # A stated scale asks for an entry that generates nothing.
        if isinstance(self._offer.api, CompletionsApi) or self._scale is not LogprobScale.RAW:
            return 0
        asked = self._prepare(GenerationRequest(as_ids([0]), _ONE_CANDIDATE, uuid4().hex))
        piece = self._offer.api.piece(asked, await self._client.call(self._call_of(asked), self._offer.api.kind))
        if piece.masks is None:
            return 0
        self._scale = LogprobScale.AFTER_TEMPERATURE  # with masks vLLM requires `--logprobs-mode processed_logprobs`
        return MAX_MASK_IDS

    async def _connect(self) -> None:
        model = await find_model(self._client)
        # An empty request detects the endpoint: 400 if it exists, 403 or 404 if not.
        answer = await self._client.ask(HttpCall("POST", GenerateApi.path, _PROBE_S, {}))
        api = CompletionsApi() if answer.status in MISSING else GenerateApi()
        version = await self._client.get("/version", VersionAnswer, deadline_s=_HEALTH_S)
        self._entered_offer = _Offer(model, api, version.version)
        self._started_with = model.root
        self._has_dev_mode = (await self._client.ask(HttpCall("GET", "/is_paused", _PROBE_S))).status not in MISSING
        try:
            ranks = (await self._metrics()).label_values(_RUNNING, "engine")
        except EngineRejected:  # no metrics: the server chooses ranks itself
            ranks = []
        self._join_ranks(ranks)

    async def _metrics(self) -> Metrics:
        return Metrics(await self._client.get_text("/metrics", deadline_s=_HEALTH_S), self._client.name)

    def _describe(self) -> Capabilities:
        offer = self._offer
        return Capabilities(
            engine="vllm",
            model=offer.model.id,
            vocab_size=self._vocab_size,
            context_length=offer.model.max_model_len,
            logprob_scale=self._scale,
            pause_modes=frozenset(PauseMode) if self._has_dev_mode else frozenset(),
            max_top_logprobs=_MAX_TOP_LOGPROBS,
            follows_json_schema=True,
            can_update_weights=self._has_dev_mode,
            repeat_guard=self._guard,
            follows_scripts=self._follows_scripts,
            may_stop_early=False,
            version=offer.version,
            routed_experts=self._router,
            max_mask_ids=self._max_mask_ids,
        )

    def _prepare(self, request: GenerationRequest) -> Asked:
        name, router = self._client.name, None if request.rows_from is None else self._router
        if self._max_mask_ids:
            most = self._max_mask_ids if request.params.sampling_mask else self._vocab_size
            request = replace(request, params=bound_candidates(request.params, most))
        asked = Asked(name, request, self._vocab_size, rank=self._rank_of(request), router=router)
        return fit_budget(self.capabilities, asked)

    def _call_of(self, asked: Asked, interval: int | None = None) -> HttpCall:
        session_id = asked.request.session_id
        headers = {"x-request-id": asked.request.request_id} | ({"x-session-id": session_id} if session_id else {})
        headers |= {} if asked.rank is None else {"x-data-parallel-rank": str(asked.rank)}
        body = self._offer.api.body(asked, self._offer.model.id, interval)
        path = self._offer.api.path
        about = (headers, asked.request.request_id, asked.row_bytes)
        return HttpCall("POST", path, self._generation_timeout_s, body, *about)

    async def _gather(self, asked: Asked, live: LiveRequest) -> GenerationResult:
        """Read the answer in pieces, reporting now and then, and once more before an error is raised."""
        streamed = StreamedPieces(asked, self._offer.api)
        moment, before = self._served.asking(), await self._label_around()
        # Coarse, since a broken connection loses up to an interval. Versions come at the end of a stream; if it breaks,
        # label reads determine its tokens' versions (`Unlabeled`).
        call = self._call_of(asked, STREAM_INTERVAL if asked.request.on_ids is None else 1)
        arrived = Unlabeled(self._served, before, moment)
        payloads: list[bytes] = []

        def tell() -> None:
            try:
                while payloads:
                    streamed.add(self._client.decode(call, payloads.pop(0), streamed.kind))
            finally:
                delta = streamed.delta()
                if delta is not None:
                    arrived.note(delta.output_ids.size)
                    asked.request.tell(replace(delta, version_spans=arrived.version_spans))

        async def hear() -> None:
            live.heard.set()
            tell()

        try:
            await self._client.gather_events(call, payloads, hear, gather_s=GATHER_S)
            streamed.require_end()
        except BaseException as error:  # cancellation too: the caller keeps what arrived
            with suppress(EngineError):  # the first error is raised
                tell()
            if isinstance(error, EngineError) and streamed.whole.ids:
                await self._look_again()
                asked.request.tell(GenerationDelta(as_ids(()), as_logprobs(()), arrived.version_spans))
            raise
        live.is_answered = True
        label = await self._same_label(asked, before)
        return self._learn_from(verify_reply(asked, read_piece(asked, self._offer.api, streamed.whole, label)), moment)

    async def _look_again(self) -> None:
        with suppress(EngineError, TimeoutError):
            # The caller keeps the tokens of a broken request; an unchanged label tells their version.
            async with asyncio.timeout(_LAST_LOOK_S):
                await self.read_version()

    async def _whole_result(self, asked: Asked) -> GenerationResult:
        moment = self._served.asking()
        piece, label = await self._whole(asked)
        api = self._offer.api
        size_bytes = _ENTRY_BYTES * (len(piece.named) + len(piece.prompt_scored or ()))
        result = await self._client.apart(size_bytes, lambda: verify_reply(asked, read_piece(asked, api, piece, label)))
        return self._learn_from(result, moment)

    async def _whole(self, asked: Asked) -> tuple[VLLMPiece, str]:
        before = await self._label_around()
        call = self._call_of(asked)
        api = self._offer.api
        piece = await self._client.call_for(call, api.kind, partial(api.piece, asked))
        return piece, await self._same_label(asked, before)

    async def _stream(self, asked: Asked, live: LiveRequest) -> AsyncGenerator[GenerationDelta | GenerationResult]:
        if asked.request.prompt_logprobs_from is not None:  # not in a stream, so there is one delta
            result = await self._whole_result(asked)
            live.is_answered = True
            yield GenerationDelta(result.output_ids, result.logprobs)
            yield result
            return
        streamed = StreamedPieces(asked, self._offer.api)
        moment, before = self._served.asking(), await self._label_around()
        call = self._call_of(asked, 1)
        arrived = Unlabeled(self._served, before, moment)
        try:
            async with aclosing(self._client.events(call)) as events:
                async for payload in (payload async for payloads in events for payload in payloads):
                    streamed.add(self._client.decode(call, payload, streamed.kind))
                    delta = streamed.delta()
                    if delta is not None:
                        arrived.note(delta.output_ids.size)
                        yield replace(delta, version_spans=arrived.version_spans)
            streamed.require_end()
        except EngineError:
            if streamed.whole.ids:
                await self._look_again()
                yield GenerationDelta(as_ids(()), as_logprobs(()), arrived.version_spans)
            raise
        label = await self._same_label(asked, before)
        yield self._learn_from(verify_reply(asked, read_piece(asked, self._offer.api, streamed.whole, label)), moment)

    async def _label_around(self) -> str:
        return self._served.label if self._offer.api.reports_spans else await self._read_label()

    async def _same_label(self, asked: Asked, before: str) -> str:
        try:
            after = await self._label_around()
        except (EngineUnavailable, EngineRejected) as error:  # from reading the label; the request was answered
            raise EngineConnectionLost(
                f"{asked.name}: its tokens cannot be assigned to a request: {error.message}"
            ) from error
        # `/v1/completions` reports no versions. Without dev mode, weights cannot change over HTTP.
        if not self._offer.api.reports_spans and before != after:
            raise EngineReplyInvalid(
                f"{asked.name}: the weights changed from {before!r} to {after!r} while it"
                " ran, and /v1/completions does not tell which tokens are whose; start vLLM with --enable-scale-out"
            )
        return after

    async def _end_in_engine(self, *request_ids: str) -> None:
        # By the engine's ids; vLLM silently ignores unknown ones.
        api, path = self._offer.api, "/abort_requests" if self._has_dev_mode else "/inference/v1/abort_requests"
        if not self._has_dev_mode and not api.reports_spans:
            raise EngineRejected(
                f"{self._client.name} offers no abort: start vLLM with --enable-scale-out or VLLM_SERVER_DEV_MODE=1"
            )
        await self._post(path, {"request_ids": [f"{api.id_prefix}{each}{api.abort_suffix}" for each in request_ids]})
