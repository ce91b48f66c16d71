"""The provider of the toy engine: the second of its two files. What it cannot do it refuses by name."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from harness.engines.base import Capabilities, EngineHealth, LogprobScale, OneWorker, PauseMode, check_request
from harness.errors import EngineRejected
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    TokenIds,
    VersionSpan,
    as_ids,
    as_logprobs,
)


class ToyProvider:
    """A toy server as a `TokenProvider`."""

    weight_version = "0"

    def __init__(self, url: str, *, vocab_size: int, **settings: Any) -> None:
        del settings  # it has neither a key, nor a guard, nor another scale
        self._http = httpx.AsyncClient(base_url=url, timeout=60)
        self.capabilities = Capabilities(
            engine="toy",
            model="toy",
            vocab_size=vocab_size,
            context_length=4096,
            logprob_scale=LogprobScale.UNKNOWN,
            pause_modes=frozenset(),
            max_top_logprobs=0,
            follows_json_schema=False,
            can_update_weights=False,
        )

    @property
    def workers(self) -> OneWorker:
        return OneWorker(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        check_request(self.capabilities, request)
        body = {"ids": request.input_ids.tolist(), "at_most": request.params.max_new_tokens}
        said = (await self._http.post("/say", json=body)).json()
        assert said["after"] == request.input_ids.size
        ids = as_ids(said["ids"])
        span = VersionSpan(self.weight_version, 0, ids.size)
        return GenerationResult(
            request.request_id, request.input_ids, ids, as_logprobs(said["logprobs"]), FinishReason.STOP, (span,)
        )

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """See `TokenProvider`; in one delta."""
        result = await self.generate(request)
        yield GenerationDelta(result.output_ids, result.logprobs)
        yield result

    async def score(self, input_ids: TokenIds, *, start: int, session_id: str | None = None) -> PromptLogprobs:
        raise EngineRejected("a toy scores nothing")

    async def abort(self, request_id: str | None) -> int:
        await self._http.post("/quiet")
        return 0

    async def pause(self, mode: PauseMode) -> None:
        raise EngineRejected("a toy does not pause")

    async def resume(self) -> None:
        """See `TokenProvider`."""

    async def update_weights(self, path: Path, version: str) -> None:
        raise EngineRejected("a toy has no weights")

    async def read_version(self) -> str:
        return self.weight_version

    async def health(self) -> EngineHealth:
        return EngineHealth(ready=True, paused=False, running=0, waiting=0)
