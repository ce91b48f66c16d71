"""An engine that answers from the record of one session: the same tokens to the same prompt, and nothing else.

It matches requests by prompt ids and sampling. The first mismatch becomes `difference`; it and all later requests are
refused, so that an agent never continues from an answer that was not recorded. Everything in front of this
`TokenProvider` is real.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import numpy as np

from harness.engines.base import Capabilities, EngineHealth, LogprobScale, OneWorker, PauseMode, check_request
from harness.errors import EngineRejected
from harness.sessions.session import Session
from harness.tokens.tokenizer import Tokenizer
from harness.turn_ends import TurnEnd
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    TokenIds,
    Turn,
)

_REASONS = {
    TurnEnd.MODEL: FinishReason.STOP,
    TurnEnd.TOOL_CALLS: FinishReason.STOP,
    TurnEnd.LENGTH: FinishReason.LENGTH,
    TurnEnd.REPEAT: FinishReason.REPEAT,
}
# Not compared: the seed counts requests, and the budget depends on the rest of an engine's context.
_FREE = frozenset({"seed", "max_new_tokens"})
_BEFORE, _BEHIND = 8, 24


class RecordedEngine:
    """Engine that answers each turn of `session` once."""

    def __init__(self, session: Session, tokenizer: Tokenizer, model: str) -> None:
        self._tokenizer = tokenizer
        self._waiting = {turn.index: (turn, session.prompt_ids(turn)) for turn in session.turns}
        self._version = next((turn.version_spans[0].version for turn in session.turns if turn.version_spans), "0")
        self.served: list[int] = []
        """Indices of the answered turns, in order."""
        self.difference: str | None = None
        """First request that the record does not answer."""
        self.parted = asyncio.Event()
        """Set once there is a difference."""
        self.capabilities = Capabilities(
            engine="recorded",
            model=model,
            vocab_size=tokenizer.vocab_size,
            context_length=1 << 20,
            logprob_scale=LogprobScale.UNKNOWN,
            pause_modes=frozenset(),
            max_top_logprobs=0,
            follows_json_schema=True,
            can_update_weights=False,
            weights_digest="",
            follows_scripts=True,
        )

    @property
    def unasked(self) -> list[int]:
        """Turns with a recorded answer that was not requested."""
        return [index for index, (turn, _) in self._waiting.items() if turn.end in _REASONS]

    @property
    def weight_version(self) -> str:
        """Weight version of the last answered turn, initially the first turn's."""
        return self._version

    @property
    def workers(self) -> OneWorker:
        return OneWorker(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the recorded output for this prompt. Raises `EngineRejected` with the first difference."""
        check_request(self.capabilities, request)
        if self.difference is None:
            self.difference = self._difference(request)
        if self.difference is not None:
            self.parted.set()
            raise EngineRejected(f"the record has no answer: {self.difference}")
        turn, _ = self._waiting.pop(self._find(request.input_ids)[0].index)
        self.served.append(turn.index)
        if turn.version_spans:
            self._version = turn.version_spans[-1].version
        request.tell(GenerationDelta(turn.output_ids, turn.logprobs, turn.version_spans))
        return GenerationResult(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=turn.output_ids,
            logprobs=turn.logprobs,
            finish_reason=_REASONS[turn.end],
            version_spans=turn.version_spans,
            matched_stop=turn.notes.matched_stop or (int(turn.output_ids[-1]) if turn.output_ids.size else None),
        )

    async def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta | GenerationResult]:
        """Yield the whole output at once."""
        yield await self.generate(request)

    async def score(self, input_ids: TokenIds, *, start: int, session_id: str | None = None) -> PromptLogprobs:
        """Raise `EngineRejected`: there is no model."""
        raise EngineRejected("a record scores nothing")

    async def abort(self, request_id: str | None) -> int:
        """Return 0: nothing is ever in flight."""
        return 0

    async def pause(self, mode: PauseMode) -> None:
        """Raise `EngineRejected`."""
        raise EngineRejected(f"a record cannot be paused ({mode})")

    async def resume(self) -> None:
        """Do nothing, since it never pauses."""

    async def update_weights(self, path: Path, version: str) -> None:
        """Raise `EngineRejected`: there are no weights."""
        raise EngineRejected(f"a record has no weights to replace by {version} from {path}")

    async def read_version(self) -> str:
        return self._version

    async def health(self) -> EngineHealth:
        """Report ready."""
        return EngineHealth(ready=True, paused=False, running=0, waiting=0)

    def _find(self, prompt: TokenIds) -> tuple[Turn, int]:
        """Return the waiting turn with the longest common prefix, and the prefix's length."""
        common = {index: _common(prompt, ids) for index, (_, ids) in self._waiting.items()}
        index = max(
            common,
            # An exact match wins, then a turn with a whole answer, then length, then the earlier turn.
            key=lambda each: (
                common[each] == max(prompt.size, self._waiting[each][1].size),
                self._waiting[each][0].end in _REASONS,
                common[each],
                -each,
            ),
        )
        return self._waiting[index][0], common[index]

    def _difference(self, request: GenerationRequest) -> str | None:
        if not self._waiting:
            return f"all {len(self.served)} turns of the record have been answered, and the agent asked for another"
        turn, at = self._find(request.input_ids)
        prompt = self._waiting[turn.index][1]
        if at < max(prompt.size, request.input_ids.size):
            recorded, asked = (
                repr(self._tokenizer.decode(ids[max(0, at - _BEFORE) : at + _BEHIND].tolist()))
                for ids in (prompt, request.input_ids)
            )
            return (
                f"turn {turn.index} differs at token {at} of its prompt: the record has {recorded}, the agent {asked}"
            )
        if turn.end not in _REASONS:
            return f"turn {turn.index} was {turn.status} ({turn.end}), so the record has no whole answer"
        for name, value in turn.params.to_dict().items():
            now = getattr(request.params, name)
            if name not in _FREE and now != value:
                return f"turn {turn.index} was sampled with {name} {value!r}, and the agent asks for {now!r}"
        if request.params.max_new_tokens < turn.output_ids.size:
            return (
                f"turn {turn.index} has {turn.output_ids.size} tokens, and the agent asks for at most"
                f" {request.params.max_new_tokens}"
            )
        return None


def _common(one: TokenIds, other: TokenIds) -> int:
    shorter = min(one.size, other.size)
    unequal = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(unequal[0]) if unequal.size else int(shorter)
