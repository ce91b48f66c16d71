"""A policy whose logprob of a token is a known function of (token, position, version), an engine that serves it, and a
rollout whose turns are sampled, interrupted and scored in whatever order a test wants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs

from harness.engines.scripted import scripted_logprobs
from harness.samples.proximal import score_turns, scoring_start
from harness.samples.versions import expand_spans
from harness.turn_ends import TurnEnd, TurnStatus
from harness.types import (
    FinishReason,
    GenerationResult,
    Logprobs,
    PromptLogprobs,
    TokenIds,
    Turn,
    VersionSpan,
    as_ids,
    as_logprobs,
)

Policy = Callable[[TokenIds, int, int], Logprobs]
"""Raw logprobs of ids that stand at positions `start`, `start + 1`, ... under a version."""


def toy_policy(ids: TokenIds, start: int, version: int) -> Logprobs:
    """A different value for nearly every (token, position, version)."""
    return scripted_logprobs(ids, start, str(version))


def turn(
    index: int = 0,
    *,
    context: Sequence[int] = (7, 8),
    output: Sequence[int] = (),
    logprobs: Sequence[float] | Logprobs = (),
    spans: Sequence[tuple[str, int, int]] = (),
    parent: Turn | None = None,
    **fields: Any,
) -> Turn:
    """A turn after `parent`, with the columns given."""
    before = 0 if parent is None else parent.prompt_length + parent.output_ids.size
    plain = Turn(
        index=index,
        parent=None if parent is None else parent.index,
        status=TurnStatus.COMPLETED,
        end=TurnEnd.MODEL,
        context_ids=as_ids(context),
        prompt_length=before + len(context),
        prompt_digest="",
        output_ids=as_ids(output),
        logprobs=as_logprobs(logprobs),
        version_spans=tuple(VersionSpan(*span) for span in spans),
        segments=(),
        messages_delta=(),
        reply={"role": "assistant"},
        sampling={"asked": {}, "used": {"max_new_tokens": 64, "temperature": 1.0}},
        key=bytes([index]),
        ordinal=0,
        request_digest="",
        created_at=0.0,
        seconds=0.0,
    )
    return structs.replace(plain, **fields)


@dataclass
class ToyEngine:
    """Serves `policy`."""

    policy: Policy = toy_policy
    version: int = 0
    _spoken: int = 0

    def update(self, version: int) -> None:
        """Serve another version."""
        self.version = version

    def generate(self, ids: TokenIds, tokens: int, start: int | None = None) -> GenerationResult:
        """Sample `tokens` tokens after `ids`; with `start` also score `ids[start:]`."""
        output = as_ids([(self._spoken + i) % 211 for i in range(tokens)])
        self._spoken += tokens
        return GenerationResult(
            request_id="0" * 32,
            input_ids=ids,
            output_ids=output,
            logprobs=as_logprobs(self.policy(output, ids.size, self.version)),
            finish_reason=FinishReason.ABORT,
            version_spans=(VersionSpan(str(self.version), 0, tokens),) if tokens else (),
            prompt_logprobs=None if start is None else self.score(ids, start),
        )

    def score(self, ids: TokenIds, start: int) -> PromptLogprobs:
        """Logprobs of `ids[start:]`."""
        return PromptLogprobs(start, as_logprobs(self.policy(ids[start:], start, self.version)), str(self.version))


class Rollout:
    """One branch of a session against one engine. The last turn continues being sampled until `next_turn`."""

    def __init__(self, engine: ToyEngine) -> None:
        self.engine = engine
        self.turns: list[Turn] = []

    def next_turn(self, *context: int) -> None:
        """The agent asks again; nothing has been sampled for it yet."""
        parent = self.turns[-1] if self.turns else None
        self.turns.append(turn(len(self.turns), context=context or (7, 8), parent=parent))

    def sample(self, tokens: int) -> None:
        """One request: continue with the last turn for `tokens` tokens, scoring what waits."""
        result = self.engine.generate(self.ids, tokens, scoring_start(self.turns, self.engine.version))
        if result.prompt_logprobs is not None:
            changed = {turn.index: turn for turn in score_turns(self.turns, result.prompt_logprobs)}
            self.turns = [changed.get(turn.index, turn) for turn in self.turns]
        self.turns[-1] = grown(self.turns[-1], result, result.version_spans)

    @property
    def ids(self) -> TokenIds:
        """Every token of the branch."""
        return as_ids(np.concatenate([part for each in self.turns for part in (each.context_ids, each.output_ids)]))


def grown(last: Turn, result: GenerationResult, spans: Sequence[VersionSpan]) -> Turn:
    """`last` with the tokens of `result` after it; what has been scored stays scored."""
    before = last.output_ids.size
    moved = tuple(VersionSpan(span.version, before + span.start, before + span.end) for span in spans)
    logprobs, versions = last.proximal_logprobs, last.proximal_versions
    if logprobs is not None and versions is not None:
        logprobs = as_logprobs(np.concatenate([logprobs, result.logprobs]))
        versions = as_ids(np.concatenate([versions, expand_spans(spans, result.output_ids.size)]))
    return structs.replace(
        last,
        output_ids=as_ids(np.concatenate([last.output_ids, result.output_ids])),
        logprobs=as_logprobs(np.concatenate([last.logprobs, result.logprobs])),
        version_spans=last.version_spans + moved,
        proximal_logprobs=logprobs,
        proximal_versions=versions,
    )


def proximal_of(turns: Sequence[Turn]) -> list[tuple[float, int]]:
    """(proximal logprob, its version) of every sampled token of a branch."""
    pairs = []
    for each in turns:
        versions = expand_spans(each.version_spans, each.output_ids.size)
        logprobs = each.logprobs if each.proximal_logprobs is None else each.proximal_logprobs
        pairs += zip(
            logprobs.tolist(),
            (versions if each.proximal_versions is None else each.proximal_versions).tolist(),
            strict=True,
        )
    return pairs


def true_proximal(
    turns: Sequence[Turn], versions_met: set[int], policy: Policy = toy_policy
) -> list[tuple[float, int]]:
    """The definition: each token under behavior + 1 when that is in `versions_met`, else its behavior values."""
    pairs = []
    for each in turns:
        behavior = expand_spans(each.version_spans, each.output_ids.size).tolist()
        for i, version in enumerate(behavior):
            if version + 1 in versions_met:
                value = policy(each.output_ids[i : i + 1], each.prompt_length + i, version + 1)[0]
                pairs.append((float(value), version + 1))
            else:
                pairs.append((float(each.logprobs[i]), version))
    return pairs
