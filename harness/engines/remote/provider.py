"""Base of the providers for HTTP engine servers: their parts, and the tests at entry.

Entering identifies the server, reads its label and tests it. Its tokenizer must match, a wanted repeat guard must be
active, and logprobs must be raw unless the caller states otherwise. A paused server is resumed first if requested;
otherwise the tests time out and say so.
"""

import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self
from uuid import uuid4

import msgspec

from harness.engines.base import Capabilities, LogprobScale, OneWorker
from harness.engines.logprob_scale import SELF_TEST_S, limit_test_time, require_raw_logprobs
from harness.engines.pool.placement import Placement
from harness.engines.recorded_rows import find_router
from harness.engines.remote.http_client import EngineClient
from harness.engines.remote.in_flight import InFlight, LiveRequest
from harness.engines.remote.reply import Asked, abort_unsent
from harness.engines.remote.served_model import require_same_tokenizer
from harness.engines.remote.weight_change import ChangingServer, ServedLabel, WeightChange
from harness.engines.repeat_guard import GUARD_PROBE, choose_guard, require_guard
from harness.errors import EngineRejected, EngineReplyInvalid, EngineUnavailable
from harness.machine.log import get_logger
from harness.token_rows import RoutedExperts
from harness.tokens.tokenizer import Tokenizer
from harness.types import (
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    SamplingParams,
    TokenIds,
    as_ids,
    as_logprobs,
)
from server_patch.repeat_terminate import RepeatTerminateConfig

log = get_logger(__name__)

_PROMPT = as_ids([0])
_PROVING_IDS = (1, 2)
_ROUTED = as_ids([0, 1, 2, 3])
_ONE_TOKEN = SamplingParams(1, temperature=0.0, ignore_eos=True)


class RemoteProvider(ChangingServer):
    """Serves one engine server.

    Args:
        url: Base address.
        vocab_size: Ids are valid in `0..vocab_size-1`.
        logprob_scale: RAW is verified at entry; AFTER_TEMPERATURE is trusted.
        generation_timeout_s: Limit for one generation, including queues and pauses.
        api_key: The server's key, if any.
        repeat_guard: Required configuration; None takes the environment's (`HARNESS_REPEAT_TERMINATE_*`), if any.
        tokenizer: Required tokenizer; None compares nothing.
        self_test_s: Limit for the tests at entry.
    """

    kind: ClassVar[str]
    first_label: ClassVar[str]
    """Weight label until the server reports one."""
    scale_advice: ClassVar[str]
    """Advice if logprobs are not raw."""

    def __init__(
        self,
        url: str,
        *,
        vocab_size: int,
        logprob_scale: LogprobScale = LogprobScale.RAW,
        generation_timeout_s: float = 3600.0,
        api_key: str = "",
        repeat_guard: RepeatTerminateConfig | None = None,
        tokenizer: Tokenizer | None = None,
        self_test_s: float = SELF_TEST_S,
    ) -> None:
        self.continues_at_entry = False
        self._self_test_s = self_test_s
        self._client = EngineClient(url, self.kind, api_key=api_key)
        self._vocab_size = vocab_size
        self._scale = logprob_scale
        self._generation_timeout_s = generation_timeout_s
        self._flight = InFlight(self._end_in_engine, longest_hold_s=generation_timeout_s)
        self._served = ServedLabel(self.first_label)
        self._change = WeightChange(self._client.name, self, self._served)
        self._tokenizer = tokenizer
        self._wanted_guard = choose_guard(repeat_guard, os.environ)
        self._guard: str | None = None
        self.proves_scripts = False
        self._follows_scripts = False
        self._router: RoutedExperts | None = None
        self._max_mask_ids = 0
        self._ranks = Placement()
        """Data-parallel ranks, each with its own cache."""
        self._capabilities: Capabilities | None = None
        """None until entry is complete."""

    @property
    def capabilities(self) -> Capabilities:
        """See `TokenProvider.capabilities`. Raises `EngineUnavailable` before the server has answered."""
        return self._capabilities or self._describe()

    @property
    def weight_version(self) -> str:
        return self._served.label

    @cached_property
    def workers(self) -> OneWorker:
        return OneWorker(self)

    async def __aenter__(self) -> Self:
        self._client.open()
        try:
            await self._connect()
            await self.read_version()
            if self._tokenizer is not None:
                await require_same_tokenizer(self._client, self._tokenizer)
            if self.continues_at_entry:
                await self.resume()
            async with limit_test_time(self._client.name, self._self_test_s):
                self._max_mask_ids = await self._find_masks()
                if self._wanted_guard is not None:
                    self._guard = await self.active_guard()
                    require_guard(self.capabilities, self._wanted_guard)
                if self.proves_scripts:
                    self._follows_scripts = await self._obeys()
                self._router = await self._find_router()
                if self._scale is LogprobScale.RAW:
                    self._scale = await require_raw_logprobs(self, advice=self.scale_advice)
            self._capabilities = self._describe()
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._capabilities = None
        await self._client.close()

    async def generate(
        self,
        request: GenerationRequest | None = None,
        *,
        input_ids: Sequence[int] = (),
        sampling_params: SamplingParams | None = None,
    ) -> GenerationResult:
        request = GenerationRequest.of(request, input_ids, sampling_params)
        asked = self._prepare(request)
        async with self._flight.track(request.request_id) as live:
            return await self._generate(asked, live) if await self._flight.admit(live) else abort_unsent(asked)

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        asked = self._prepare(request)
        async with self._flight.track(request.request_id) as live:
            if not await self._flight.admit(live):
                yield abort_unsent(asked)
                return
            async with aclosing(self._stream(asked, live)) as pieces:
                async for piece in pieces:
                    live.heard.set()
                    live.is_answered |= isinstance(piece, GenerationResult)
                    yield piece

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        params = SamplingParams(max_new_tokens=1, temperature=0.0, top_logprobs=top)
        asked = self._prepare(GenerationRequest(input_ids, params, uuid4().hex, session_id, start))
        asked = msgspec.structs.replace(asked, is_scoring=True)
        if start == input_ids.size:
            return PromptLogprobs(start, as_logprobs(()), self._served.label)
        moment = self._served.asking()
        scores = await self._score(asked)
        self._served.learn(scores.version, moment)
        return scores

    async def update_weights(self, path: Path, version: str) -> None:
        """See `TokenProvider.update_weights`; `path` is on the server's machine."""
        await self._change.run(path, version)

    async def active_guard(self) -> str | None:
        """Return the digest of the active repeat guard, or None; generates a token or two."""
        asked = self._prepare(GenerationRequest(_PROMPT, GUARD_PROBE, uuid4().hex))
        return await self._read_guard(msgspec.structs.replace(asked, probes_guard=True))

    async def _obeys(self) -> bool:
        self._follows_scripts = True  # else `check_request` refuses the test
        try:
            # Two scripts after one prompt: a server that ignores `force_ids` outputs the same token twice.
            for token_id in _PROVING_IDS:
                script_ids = as_ids([token_id])
                said = await self.generate(GenerationRequest(_PROMPT, _ONE_TOKEN, uuid4().hex, script_ids=script_ids))
                if not said.output_ids.size:
                    raise EngineUnavailable(
                        f"{self._client.name}: another client aborted the test whether it follows scripts;"
                        " try again when that client is done"
                    )
        except (EngineRejected, EngineReplyInvalid) as error:
            log.info("engine_follows_no_scripts", engine=self._client.name, error=error.message)
            return False
        finally:
            self._follows_scripts = False
        return True

    async def _find_router(self) -> RoutedExperts | None:
        """Return the model's router if the server returns its choices from an offset on, else None."""
        folder = None if self._tokenizer is None else self._tokenizer.folder
        router = None if folder is None else find_router(folder)
        if router is None:
            return None
        self._router = router  # else `check_request` refuses the test
        try:
            for start in (0, _ROUTED.size - 1):  # a server that ignores offsets returns as many rows again
                request = GenerationRequest(_ROUTED, _ONE_TOKEN, uuid4().hex, rows_from=start)
                if (await self.generate(request)).rows is None:
                    log.warning("engine_returns_no_routed_experts", engine=self._client.name)
                    return None
        except (EngineRejected, EngineReplyInvalid) as error:
            log.warning("engine_returns_no_routed_experts", engine=self._client.name, error=error.message)
            return None
        finally:
            self._router = None
        return router

    async def expect_transfer(self, version: str) -> None:
        await self._change.expect(version)

    @abstractmethod
    def _prepare(self, request: GenerationRequest) -> Asked:
        """Return the request as the server gets it. Raises `EngineRejected` for one that it cannot serve."""

    @abstractmethod
    async def _generate(self, asked: Asked, live: LiveRequest) -> GenerationResult:
        """Return the result of an admitted request."""

    @abstractmethod
    def _stream(self, asked: Asked, live: LiveRequest) -> AsyncGenerator[GenerationDelta | GenerationResult]:
        """Yield the deltas of an admitted request and, last, the whole result."""

    @abstractmethod
    async def _score(self, asked: Asked) -> PromptLogprobs:
        """Return the logprobs that `asked` wants of its input."""

    @abstractmethod
    async def _read_guard(self, asked: Asked) -> str | None:
        """Return the digest of the guard that ends the probe `asked`."""

    @abstractmethod
    async def _find_masks(self) -> int:
        """Return the most candidates of a token that the server returns, 0 if none."""

    @abstractmethod
    async def _connect(self) -> None:
        """Collect what `_describe` needs. Raises `EngineError`."""

    @abstractmethod
    def _describe(self) -> Capabilities:
        """Return the capabilities. Raises `EngineUnavailable` before `_connect`."""

    @abstractmethod
    async def _end_in_engine(self, request_id: str, /) -> None:
        """Abort a request."""

    @staticmethod
    def _comes_in_pieces(request: GenerationRequest) -> bool:
        # Alternatives and masks are large, chunks repeat them, and an interrupted output does not keep them, so such an
        # answer comes whole.
        params = request.params
        return request.on_delta is not None and not params.top_logprobs and not params.sampling_mask

    def _join_ranks(self, names: Iterable[str]) -> None:
        self._ranks = Placement()
        for name in names:
            self._ranks.join(name)

    def _rank_of(self, request: GenerationRequest) -> int | None:
        """Return the session's rank, assigned if new; None if there is no choice."""
        if len(self._ranks.workers) < 2 or request.session_id is None:
            return None
        self._ranks.ask(0, request.session_id, prompt=request.input_ids)
        [(_, rank)] = self._ranks.grants(now=0.0)
        self._ranks.finish(rank)  # only sessions are balanced here; the server balances requests
        self._ranks.place(request.session_id, rank, request.input_ids.size)
        return int(rank.name)

    def _learn_from(self, result: GenerationResult, moment: int) -> GenerationResult:
        if result.version_spans:
            self._served.learn(result.version_spans[-1].version, moment)
        return result
