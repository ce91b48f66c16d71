"""The local engine as a `TokenProvider`: asyncio outside, one engine thread inside.

transformers' own continuous batching (5.23) is not used: it loses the partial output of a cancelled request, shares one
random generator, has no min-p per request and cannot score prompts. Its strength is paged attention on a GPU.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar
from uuid import uuid4

from harness.engines.base import (
    Capabilities,
    EngineCount,
    EngineHealth,
    LogprobScale,
    OneWorker,
    PauseMode,
    check_request,
)
from harness.engines.huggingface.local_generation import StopRules
from harness.engines.huggingface.scheduler import BatchLimits, Scheduler
from harness.engines.huggingface.thread import EngineThread
from harness.engines.recorded_rows import MAX_MASK_IDS
from harness.engines.repeat_guard import choose_guard, object_key_ids, prove_guard
from harness.errors import EngineError, EngineRejected, ModelError
from harness.tokens.tokenizer import Tokenizer
from harness.types import (
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    SamplingParams,
    TokenIds,
    as_logprobs,
)
from server_patch.repeat_terminate import RepeatDetector, RepeatTerminateConfig

if TYPE_CHECKING:  # it imports torch
    from harness.engines.huggingface.engine import LocalEngine, RequestOutcome

T = TypeVar("T")

_MAX_TOP_LOGPROBS = 20
_STOP_DEADLINE_S = 30.0
_SMALLEST_KV_TOKENS = 256


class HuggingFaceTokenProvider:
    """Serves the HuggingFace model in a local folder, in this process.

    Args:
        model_dir: Folder with `config.json`, `tokenizer.json` and `*.safetensors`.
        max_batch: Sequences computed together.
        kv_cache_bytes: Limit for KV, cached prefixes included.
        step_tokens: Tokens per step; limits how long a prompt delays other requests.
        shares_prefixes: Reuse other sessions' KV, which changes logprobs in the last bit.
        threads: For matrix products; None leaves one core free.
        dtype: torch type; `float32` is exact enough as ground truth.
        version: Label of the weights in `model_dir`.
        name: Model name; empty takes the folder's.
        repeat_guard: None takes the configuration in the environment (`HARNESS_REPEAT_TERMINATE_*`), if any.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        max_batch: int = 32,
        kv_cache_bytes: int = 2 << 30,
        step_tokens: int = 128,
        shares_prefixes: bool = True,
        threads: int | None = None,
        dtype: str = "float32",
        version: str = "0",
        name: str = "",
        repeat_guard: RepeatTerminateConfig | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._name = name or model_dir.resolve().name
        self._max_batch = max_batch
        self._kv_cache_bytes = kv_cache_bytes
        self._step_tokens = step_tokens
        self._shares_prefixes = shares_prefixes
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) - 1)
        self._dtype = dtype
        self._repeat_guard = choose_guard(repeat_guard, os.environ)
        self._object_key_ids: list[int] = []
        self._thread = EngineThread(self._build)
        self._version = version
        self._since = uuid4().hex

    @property
    def capabilities(self) -> Capabilities:
        """See `TokenProvider.capabilities`. Raises `EngineError` unless the engine runs."""
        engine = self._require_entered()
        return Capabilities(
            engine="local",
            model=self._name,
            vocab_size=engine.facts.vocab_size,
            context_length=engine.context_length,
            logprob_scale=LogprobScale.RAW,
            pause_modes=frozenset(PauseMode),
            max_top_logprobs=_MAX_TOP_LOGPROBS,
            follows_json_schema=False,
            can_update_weights=True,
            weights_digest=engine.facts.weights_digest,
            repeat_guard=self._repeat_guard.digest() if self._repeat_guard else None,
            follows_scripts=True,
            max_mask_ids=MAX_MASK_IDS,
            routed_experts=engine.facts.routed_experts,
        )

    @property
    def weight_version(self) -> str:
        return self._version if self._thread.engine is None else self._thread.engine.version

    @property
    def workers(self) -> OneWorker:
        return OneWorker(self)

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await asyncio.shield(asyncio.wrap_future(self._thread.ready))
        except asyncio.CancelledError:
            self._thread.request_stop()
            raise
        if self._repeat_guard is None:
            return self
        try:
            await prove_guard(self, self._repeat_guard, self._object_key_ids)
        except BaseException:  # an engine without the wanted guard must not stay up
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.request_stop()
        has_stopped = await asyncio.to_thread(self._thread.join, _STOP_DEADLINE_S)
        if not has_stopped and kind is None:
            raise EngineError(f"the local engine did not stop within {_STOP_DEADLINE_S:.0f} s")

    async def generate(
        self,
        request: GenerationRequest | None = None,
        *,
        input_ids: Sequence[int] = (),
        sampling_params: SamplingParams | None = None,
    ) -> GenerationResult:
        request = GenerationRequest.of(request, input_ids, sampling_params)
        self._check(request)
        outcome = await self._outcome(request)
        assert isinstance(outcome, GenerationResult)
        return outcome

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        self._check(request)
        async with aclosing(self._events(request, wants_deltas=True)) as events:
            async for event in events:
                assert not isinstance(event, PromptLogprobs)
                yield event

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        """See `TokenProvider.score`; the input may fill the whole context."""
        params = SamplingParams(max_new_tokens=1, top_logprobs=top)
        request = GenerationRequest(input_ids, params, uuid4().hex, prompt_logprobs_from=start)
        check_request(replace(self.capabilities, context_length=self.capabilities.context_length + 1), request)
        if start == input_ids.size:
            return PromptLogprobs(start, as_logprobs([]), self.weight_version)
        outcome = await self._outcome(replace(request, params=replace(params, max_new_tokens=0)))
        assert isinstance(outcome, PromptLogprobs)
        return outcome

    async def abort(self, request_id: str | None) -> int:
        """See `TokenProvider.abort`; on return, sampling has stopped."""
        return await self._call(lambda engine: engine.abort(request_id))

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider.pause`; on return, sampling has stopped."""
        await self._call(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._call(lambda engine: engine.resume())

    async def update_weights(self, path: Path, version: str) -> None:
        await self._call(lambda engine: engine.update_weights(path, version))

    async def read_version(self) -> str:
        return self.weight_version

    async def flush_cache(self) -> bool:
        return await self._call(lambda engine: engine.flush_cache())

    async def health(self) -> EngineHealth:
        engine = self._thread.engine
        if engine is None:
            return EngineHealth(ready=False, paused=False, running=0, waiting=0, detail=self._thread.failure)
        return EngineHealth(ready=True, paused=engine.is_paused, running=engine.running, waiting=engine.waiting)

    async def count_sampled(self) -> EngineCount:
        engine = self._require_entered()
        return EngineCount("the local engine", self._since, engine.sampled_tokens)

    def _build(self) -> "LocalEngine":
        try:
            from harness.engines.huggingface.engine import LocalEngine
            from harness.engines.huggingface.model import RaggedModel
        except ImportError:
            raise ModelError("the local engine needs `pip install 'session-harness[local]'`") from None
        tokenizer = Tokenizer.load(self._model_dir)
        model = RaggedModel.load(self._model_dir, dtype=self._dtype, threads=self._threads)
        kv_tokens = self._kv_cache_bytes // model.facts.kv_bytes_per_token
        if kv_tokens < _SMALLEST_KV_TOKENS:
            raise ModelError(
                f"kv_cache_bytes holds {kv_tokens} tokens of this model, at least {_SMALLEST_KV_TOKENS} are needed"
            )
        scheduler = Scheduler(BatchLimits(self._max_batch, self._step_tokens, kv_tokens, self._shares_prefixes))
        context_length = min(model.facts.context_length, kv_tokens)
        self._object_key_ids = object_key_ids(tokenizer)
        rules = StopRules(tokenizer.eos_ids, context_length, tokenizer.decode, byte_ids=tokenizer.byte_ids)
        if self._repeat_guard is not None:
            rules = rules._replace(new_detector=partial(RepeatDetector, self._repeat_guard, self._object_key_ids))
        return LocalEngine(model, scheduler, rules, version=self._version)

    def _require_entered(self) -> "LocalEngine":
        if self._thread.engine is None:
            raise self._thread.explain_end()
        return self._thread.engine

    def _check(self, request: GenerationRequest) -> None:
        check_request(self.capabilities, request)
        params = request.params
        if params.temperature < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1 or params.top_k < 0:
            raise EngineRejected(
                "expected temperature >= 0, 0 < top_p <= 1, 0 <= min_p <= 1 and top_k >= 0, got"
                f" {params.temperature}, {params.top_p}, {params.min_p} and {params.top_k}"
            )

    async def _call(self, function: Callable[["LocalEngine"], T]) -> T:
        self._require_entered()
        return await asyncio.wrap_future(self._thread.call(function))

    async def _outcome(self, request: GenerationRequest) -> GenerationResult | PromptLogprobs:
        async with aclosing(self._events(request, wants_deltas=False)) as events:
            async for event in events:
                if not isinstance(event, GenerationDelta):
                    return event
        raise AssertionError("events end with an outcome")

    async def _events(
        self, request: GenerationRequest, *, wants_deltas: bool
    ) -> AsyncGenerator[GenerationDelta | GenerationResult | PromptLogprobs]:
        inbox = _Inbox(wants_deltas=wants_deltas)
        try:
            await self._call(lambda engine: engine.submit(request, inbox))
            while not inbox.is_exhausted:
                yield await inbox.next_event()
        finally:
            # The caller left early; its request must not keep sampling.
            if not inbox.is_exhausted:
                self._thread.call(lambda engine: engine.drop(request))


class _Inbox:
    """Passes events from the engine's thread to the waiting task."""

    def __init__(self, *, wants_deltas: bool) -> None:
        self.wants_deltas = wants_deltas
        self.is_exhausted = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[GenerationDelta | RequestOutcome] = asyncio.Queue()

    def __call__(self, event: "GenerationDelta | RequestOutcome") -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def next_event(self) -> GenerationDelta | GenerationResult | PromptLogprobs:
        """Return the next event. Raises the `EngineError` that ended the request."""
        event = await self._events.get()
        self.is_exhausted = not isinstance(event, GenerationDelta)
        if isinstance(event, EngineError):
            raise event
        return event
