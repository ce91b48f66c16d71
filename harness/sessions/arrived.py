"""The part of an engine's answer that has come while the request runs: what is left of it when it breaks."""

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
class Arrived:
    """Takes in the deltas of one request."""

    count: int = 0
    """Tokens so far."""
    heard: int = 0
    """Tokens whose ids were told as they came; the rest of what is said of them may come later."""
    version_spans: tuple[VersionSpan, ...] = ()
    """As far as the engine has said which weights sampled them."""
    _deltas: list[GenerationDelta] = field(default_factory=list)

    def add(self, delta: GenerationDelta) -> None:
        """Take in the next tokens, or more about those before."""
        self._deltas.append(delta)
        self.count += int(delta.output_ids.size)
        self.version_spans = delta.version_spans or self.version_spans

    @property
    def sampled(self) -> int:
        """Tokens that are known of."""
        return max(self.count, self.heard)

    def follows(self, script_ids: TokenIds | None) -> bool:
        """The tokens are those that the request was to say; any are where it was to say nothing in particular."""
        return script_ids is None or np.array_equal(self._ids(), script_ids[: self.count])

    def partial(self, request: GenerationRequest, spans: Sequence[VersionSpan]) -> GenerationResult:
        """The tokens that `spans` cover, as if the engine had aborted the request behind them."""
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
