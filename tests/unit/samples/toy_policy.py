"""A policy whose logprob of a token is a known function of (token, position, version), an engine that serves it, and a
rollout whose turns are sampled, interrupted and scored in whatever order a test wants.

The engine keeps a KV cache of the versions that computed it: a logprob computed on top of stale KV is off by a known
amount. How scorings are asked for and applied is a `Collector`: the right one calls `harness.samples.proximal`, tests
of mistakes put others in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.engines.base import LogprobScale, is_on_prompt_scale
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

_STALE_NATS = 0.25


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
    temperature: float = 1.0,
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
        sampling={"asked": {}, "used": {"max_new_tokens": 64, "temperature": temperature}},
        key=bytes([index]),
        ordinal=0,
        request_digest="",
        created_at=0.0,
        seconds=0.0,
    )
    return replace(plain, **fields)


@dataclass
class ToyEngine:
    """Serves `policy`; what a mistake of the engine or of its configuration would change is a field."""

    policy: Policy = toy_policy
    version: int = 0
    flushes: bool = True
    """An update empties the KV cache."""
    scale: LogprobScale = LogprobScale.RAW
    temperature: float = 1.0
    _kv: list[tuple[int, int]] = field(default_factory=list)
    """(token, version) of each cached position."""
    _spoken: int = 0

    def update(self, version: int) -> None:
        """Serve another version."""
        self.version = version
        if self.flushes:
            self._kv.clear()

    def generate(self, ids: TokenIds, tokens: int, start: int | None = None) -> GenerationResult:
        """Sample `tokens` tokens after `ids`; with `start` also score `ids[start:]`."""
        stale = self._read(ids, reuse=ids.size - 1 if start is None else start - 1)
        output = as_ids([(self._spoken + i) % 211 for i in range(tokens)])
        self._spoken += tokens
        prompt = None if start is None else self._prompt_logprobs(ids, start, stale)
        raw = self.policy(output, ids.size, self.version) - stale * _STALE_NATS
        self._read(as_ids(np.concatenate([ids, output])), reuse=ids.size)
        return GenerationResult(
            request_id="0" * 32,
            input_ids=ids,
            output_ids=output,
            logprobs=as_logprobs(raw / self.temperature if self.scale is LogprobScale.AFTER_TEMPERATURE else raw),
            finish_reason=FinishReason.ABORT,
            version_spans=(VersionSpan(str(self.version), 0, tokens),) if tokens else (),
            prompt_logprobs=prompt,
        )

    def score(self, ids: TokenIds, start: int) -> PromptLogprobs:
        """Logprobs of `ids[start:]`."""
        return self._prompt_logprobs(ids, start, self._read(ids, reuse=start - 1))

    def _prompt_logprobs(self, ids: TokenIds, start: int, stale: int) -> PromptLogprobs:
        values = self.policy(ids[start:], start, self.version) - stale * _STALE_NATS
        return PromptLogprobs(start, as_logprobs(values), str(self.version))

    def _read(self, ids: TokenIds, *, reuse: int) -> int:
        """Compute the KV of `ids`, reusing up to `reuse` cached positions; returns how many of those are stale."""
        shared = 0
        while shared < min(reuse, len(self._kv)) and self._kv[shared][0] == ids[shared]:
            shared += 1
        self._kv = self._kv[:shared] + [(int(token), self.version) for token in ids[shared:]]
        return sum(version != self.version for _, version in self._kv[:shared])


class Collector:
    """How the harness asks for scorings and applies them."""

    def start(self, turns: Sequence[Turn], engine: ToyEngine) -> int | None:
        """Where the next request of the branch starts scoring."""
        return scoring_start(self.comparable(turns, engine), engine.version)

    def apply(self, turns: Sequence[Turn], scoring: PromptLogprobs, engine: ToyEngine) -> list[Turn]:
        """The turns of the branch after `scoring`."""
        changed = {turn.index: turn for turn in score_turns(self.comparable(turns, engine), scoring)}
        return [changed.get(turn.index, turn) for turn in turns]

    def behavior(self, result: GenerationResult, engine: ToyEngine) -> tuple[VersionSpan, ...]:
        """The versions of what was just sampled; `engine` is as it is after the reply."""
        del engine
        return result.version_spans

    def comparable(self, turns: Sequence[Turn], engine: ToyEngine) -> list[Turn]:
        """The turns whose behavior logprobs are on the scale of prompt logprobs."""
        return [turn for turn in turns if is_on_prompt_scale(engine.scale, turn.params)]


class Rollout:
    """One branch of a session against one engine. The last turn goes on being sampled until `next_turn`."""

    def __init__(self, engine: ToyEngine, collector: Collector | None = None) -> None:
        self.engine = engine
        self.collector = collector or Collector()
        self.turns: list[Turn] = []
        self.update_before_reply: int | None = None
        """The engine is updated to this version between the next reply and whoever reads it."""

    def next_turn(self, *context: int) -> None:
        """The agent asks again; nothing has been sampled for it yet."""
        parent = self.turns[-1] if self.turns else None
        self.turns.append(
            turn(len(self.turns), context=context or (7, 8), parent=parent, temperature=self.engine.temperature)
        )

    def sample(self, tokens: int) -> None:
        """One request: go on with the last turn for `tokens` tokens, scoring what the collector wants scored."""
        start = self.collector.start(self.turns, self.engine)
        result = self.engine.generate(self.ids, tokens, start)
        if self.update_before_reply is not None:
            self.engine.update(self.update_before_reply)
            self.update_before_reply = None
        if result.prompt_logprobs is not None:
            self.turns = self.collector.apply(self.turns, result.prompt_logprobs, self.engine)
        self.turns[-1] = grown(self.turns[-1], result, self.collector.behavior(result, self.engine))

    def sweep(self) -> None:
        """Score what waits for the live version, without sampling."""
        start = self.collector.start(self.turns, self.engine)
        if start is not None:
            scoring = self.engine.score(self.ids, start)
            self.turns = self.collector.apply(self.turns, scoring, self.engine)

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
    return replace(
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
