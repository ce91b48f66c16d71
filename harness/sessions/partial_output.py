"""Partial output of a running engine request, kept in case it breaks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    TokenIds,
    VersionSpan,
    as_ids,
    as_logprobs,
)


@dataclass(slots=True)
class PartialOutput:
    count: int = 0
    heard: int = 0
    """Tokens whose ids were streamed; logprobs and versions may follow."""
    version_spans: tuple[VersionSpan, ...] = ()
    _deltas: list[GenerationDelta] = field(default_factory=list)

    def add(self, delta: GenerationDelta) -> None:
        self._deltas.append(delta)
        self.count += int(delta.output_ids.size)
        self.version_spans = delta.version_spans or self.version_spans

    @property
    def sampled(self) -> int:
        """Tokens known to be sampled."""
        return max(self.count, self.heard)

    def follows(self, script_ids: TokenIds | None) -> bool:
        """Return True unless the tokens differ from the script."""
        return script_ids is None or np.array_equal(self._ids(), script_ids[: self.count])

    def partial(self, request: GenerationRequest, spans: Sequence[VersionSpan]) -> GenerationResult:
        """Return the tokens that `spans` cover, as an aborted result."""
        size = min(spans[-1].end, self.count) if spans else 0
        logprobs = [delta.logprobs for delta in self._deltas]
        return GenerationResult(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=self._ids()[:size],
            logprobs=as_logprobs(np.concatenate([as_logprobs(()), *logprobs])[:size]),
            finish_reason=FinishReason.ABORT,
            version_spans=tuple(span for span in spans if span.end <= size),
        )

    def _ids(self) -> TokenIds:
        return as_ids(np.concatenate([as_ids(()), *(delta.output_ids for delta in self._deltas)]))
