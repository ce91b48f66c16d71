"""A deterministic engine that plays a script, for tests, benchmarks and demonstrations.

The n-th generation of a session plays the n-th step of its `Script`; a continuation (`GenerationRequest.continues`)
resumes its step, without the fault. Logprobs are a known function of token, position and weight version
(`scripted_logprobs`).
"""

import asyncio
import re
import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Self, assert_never
from uuid import uuid4
from zlib import crc32

import msgspec
import numpy as np
from msgspec.structs import replace

from harness.decoding import convert
from harness.engines.base import (
    Capabilities,
    EngineCount,
    EngineHealth,
    LogprobScale,
    OneWorker,
    PauseMode,
    check_request,
)
from harness.engines.recorded_rows import MAX_MASK_IDS
from harness.engines.repeat_guard import object_key_ids
from harness.errors import EngineConnectionLost, EngineRejected, EngineUnavailable, ScenarioError
from harness.machine.deadlines import await_any, within
from harness.samples.versions import known_version, require_settled
from harness.token_rows import RaggedRows, RoutedExperts, RowValues, TokenRows
from harness.tokens.incremental import Spelled, StopStrings
from harness.tokens.tokenizer import Tokenizer
from harness.top_logprobs import TopLogprobs
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    Logprobs,
    PromptLogprobs,
    TokenIds,
    VersionSpan,
    as_ids,
    as_logprobs,
)
from server_patch.repeat_terminate import RepeatDetector, RepeatTerminateConfig

_MAX_TOP_LOGPROBS = 5
_ROUTER = RoutedExperts(layers=2, top_k=2, experts=8)
_MOST_OTHERS = 4  # candidates besides a token
_SURE = 0.999  # probability of the id that a rule expects; all others share the rest


class ScriptedFault(StrEnum):
    """Ways in which a step fails after `fault_after` tokens."""

    ABORT = "abort"
    """Finish reason `abort`, though no client aborted."""
    DISCONNECT = "disconnect"
    UNAVAILABLE = "unavailable"
    REJECT = "reject"
    HANG = "hang"
    """No further token until an abort or a cancellation."""


class ScriptStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    text: str = ""
    """The end-of-turn id follows unless `finish` is `length`."""
    tokens: tuple[int, ...] = ()
    """Exact output ids, instead of `text`."""
    finish: FinishReason = FinishReason.STOP
    delay_s: float = 0.0
    """Seconds before the first token."""
    token_delay_s: float = 0.0
    """Seconds before each further token."""
    fault: ScriptedFault | None = None
    fault_after: int = 0
    """Tokens before the fault."""


class ScriptRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distribution over next tokens: the ids of `say` after each match of `after`, even if another id is sampled."""

    after: str
    """Regular expression for the text up to an answer."""
    say: tuple[str, ...]
    """Pieces of the answer, with groups of the match as `\\1`, each encoded alone; the end-of-turn id follows."""

    def score(self, tokenizer: Tokenizer, ids: TokenIds, start: int, version: str, top: int) -> PromptLogprobs:
        """Return logprobs of `ids[start:]`; before the first match all ids are equally likely."""
        size, expected = tokenizer.vocab_size, self._expected(tokenizer, ids)[start:, None]
        each = np.hstack([ids[start:, None], (expected.clip(0) + np.arange(top, dtype=np.int32)) % np.int32(size)])
        sure = np.where(each == expected, _SURE, (1 - _SURE) / (size - 1))
        logprobs = np.log(np.where(expected < 0, 1 / size, sure)).astype(np.float32)
        tops = TopLogprobs(each[:, 1:], logprobs[:, 1:]) if top else None
        return PromptLogprobs(start, as_logprobs(logprobs[:, 0]), version, top=tops)

    def _expected(self, tokenizer: Tokenizer, ids: TokenIds) -> TokenIds:
        text, ends = Spelled.of(tokenizer, ids.tolist())[1:]
        reached = np.maximum.accumulate([0, *(end or 0 for end in ends)])
        end_id, expected = min(tokenizer.eos_ids), np.full(ids.size, -1, np.int32)
        for match in re.finditer(self.after, text):
            answer = expected[np.searchsorted(reached, match.end()) :]
            said = [*chain.from_iterable(tokenizer.encode(match.expand(piece)) for piece in self.say)][: answer.size]
            answer[: len(said)], answer[len(said) :] = said, end_id
        return expected


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of a scripted engine, repeated."""

    steps: tuple[ScriptStep, ...] = (ScriptStep(text="Understood."),)
    rule: ScriptRule | None = None
    """Distribution by which it scores."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load a TOML file. Raises `ScenarioError` naming the file and the field."""
        try:
            script = convert(tomllib.loads(path.read_text(encoding="utf-8")), cls)
            if script.rule is not None:
                re.sub(script.rule.after, "".join(script.rule.say), "")  # both can be read
        except (OSError, ValueError, re.error, msgspec.ValidationError) as error:
            raise ScenarioError(f"{path}: {error}") from error
        if not script.steps:
            raise ScenarioError(f"{path}: steps: expected at least one step, got none")
        return script


def scripted_logprobs(ids: TokenIds, start: int, version: str) -> Logprobs:
    """Return the logprobs of `ids` at positions `start`, `start + 1`, ... under the weights `version`."""
    position = np.arange(start, start + ids.size, dtype=np.int64)
    mixed = ids.astype(np.int64) * 7919 + position * 104_729 + _salt(version) * 15_485_863
    return as_logprobs(-((mixed % 4093) + 1) / 1024)


def scripted_experts(router: RoutedExperts, ids: TokenIds, start: int, version: str) -> RowValues:
    """Return the experts of `ids` at positions `start`, `start + 1`, ... under the weights `version`."""
    position = np.arange(start, start + ids.size, dtype=np.int64)
    of_token = ids.astype(np.int64) * 31 + position * 7 + _salt(version) * 17
    layer, choice = np.arange(router.layers) * 13, np.arange(router.top_k)
    experts = (of_token[:, None, None] + layer[:, None] + choice) % router.experts
    return experts.astype(router.dtype)


def scripted_masks(ids: TokenIds, start: int, version: str, vocab_size: int) -> list[TokenIds]:
    """Return the candidates of `ids` at positions `start`, `start + 1`, ... under the weights `version`."""
    others = (ids * 13 + np.arange(start, start + ids.size) * 5 + _salt(version) * 11) % _MOST_OTHERS
    return [as_ids((each + np.arange(1 + more)) % vocab_size) for each, more in zip(ids, others, strict=True)]


def _salt(version: str) -> int:
    number = known_version(version)
    return crc32(version.encode()) if number is None else number  # labels without a number differ too


class LiveGeneration(msgspec.Struct, frozen=True):
    request_id: str
    sampled: int
    """Tokens so far."""
    is_aborted: bool


@dataclass(slots=True)
class _Live:
    request: GenerationRequest
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, ids: list[int], version: str) -> GenerationDelta:
        array = as_ids(ids)
        logprobs = scripted_logprobs(array, self.request.input_ids.size + len(self.output), version)
        start = len(self.output)
        self.output += ids
        self.logprobs.append(logprobs)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, len(self.output)))
        return GenerationDelta(array, logprobs, tuple(self.spans))


class _Ending(msgspec.Struct, frozen=True):
    ids: list[int]
    reason: FinishReason
    matched: int | str | None = None


class ScriptedEngine:
    """A `TokenProvider` that plays a script."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script | None = None,
        *,
        context_length: int = 1 << 20,
        model: str = "scripted",
        repeat_guard: RepeatTerminateConfig | None = None,
        routed_experts: RoutedExperts | None = _ROUTER,
    ) -> None:
        self._tokenizer = tokenizer
        self._repeat_guard = repeat_guard
        self._script = script or Script()
        self._played: Counter[str] = Counter()
        self._live: dict[str, _Live] = {}
        self._running = asyncio.Event()
        self._running.set()
        self._version = "0"
        self._since, self._said = uuid4().hex, 0
        self.capabilities = Capabilities(
            engine="scripted",
            model=model,
            vocab_size=tokenizer.vocab_size,
            context_length=context_length,
            logprob_scale=LogprobScale.RAW,
            pause_modes=frozenset(PauseMode),
            max_top_logprobs=_MAX_TOP_LOGPROBS,
            follows_json_schema=True,
            can_update_weights=True,
            repeat_guard=None if repeat_guard is None else repeat_guard.digest(),
            follows_scripts=True,
            routed_experts=routed_experts,
            max_mask_ids=MAX_MASK_IDS,
        )

    @property
    def weight_version(self) -> str:
        """Label of the weights; affects `scripted_logprobs` only."""
        return self._version

    @property
    def workers(self) -> OneWorker:
        return OneWorker(self)

    @property
    def live(self) -> tuple[LiveGeneration, ...]:
        """Generations in flight, oldest first."""
        return tuple(
            LiveGeneration(request_id, len(live.output), live.aborted.is_set())
            for request_id, live in self._live.items()
        )

    @property
    def played(self) -> Counter[str]:
        """Steps played by session id, `""` without one."""
        return Counter(self._played)

    def play_from(self, session_id: str, step: int) -> None:
        self._played[session_id] = step

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.set()
        await self.abort(None)

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        pieces = self.stream(request)
        async with aclosing(pieces):
            async for piece in pieces:
                if isinstance(piece, GenerationResult):
                    return piece
                request.tell(piece)
        raise EngineConnectionLost("the scripted engine ended a stream without a result")

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationDelta | GenerationResult, None]:
        """Play the session's next step; without delays it comes in one delta."""
        check_request(self.capabilities, request)
        if request.request_id in self._live:
            raise EngineRejected(f"request id {request.request_id} is in use; every request needs a fresh one")
        began, start = monotonic(), request.prompt_logprobs_from
        scored: PromptLogprobs | None = None
        live = self._live[request.request_id] = _Live(request)
        try:
            step = self._next_step(request)
            ending = self._ending(step, request)
            async for delta in self._play(live, step, ending):
                if scored is None and start is not None:  # an engine reads its input before it samples
                    scored = await self.score(request.input_ids, start=start)
                yield delta
        finally:
            del self._live[request.request_id]
        if scored is None and start is not None:
            scored = await self.score(request.input_ids, start=start)
        is_aborted, output = live.aborted.is_set(), as_ids(live.output)
        logprobs = as_logprobs(np.concatenate([*live.logprobs, as_logprobs(())]))
        yield GenerationResult(
            request_id=request.request_id,
            input_ids=request.input_ids,
            output_ids=output,
            logprobs=logprobs,
            finish_reason=FinishReason.ABORT if is_aborted else ending.reason,
            version_spans=tuple(live.spans),
            matched_stop=None if is_aborted else ending.matched,
            top_logprobs=_alternatives(output, logprobs, request.params.top_logprobs, self._tokenizer.vocab_size),
            prompt_logprobs=scored,
            rows=self._route(request, output, live.spans),
            masks=self._filter(request, output, live.spans),
            seconds=monotonic() - began,
        )

    def _route(self, request: GenerationRequest, output: TokenIds, spans: list[VersionSpan]) -> TokenRows | None:
        start, router, size = request.rows_from, self.capabilities.routed_experts, request.input_ids.size
        if start is None or router is None or not spans:
            return None
        ids, rows = as_ids(np.concatenate([request.input_ids, output])), []
        for span in spans:  # the pass that reads a token samples the next one
            begin, end = size + span.start - 1 if span.start else start, size + span.end - 1
            rows.append(scripted_experts(router, ids[begin:end], begin, span.version))
        return TokenRows(start, np.concatenate(rows))

    def _filter(self, request: GenerationRequest, output: TokenIds, spans: list[VersionSpan]) -> RaggedRows | None:
        if not request.params.sampling_mask:
            return None
        start, size = int(request.input_ids.size), self.capabilities.vocab_size
        each = (scripted_masks(output[at.start : at.end], start + at.start, at.version, size) for at in spans)
        return RaggedRows.of(start, [*chain.from_iterable(each)])

    async def score(
        self, input_ids: TokenIds, *, start: int, session_id: str | None = None, top: int = 0
    ) -> PromptLogprobs:
        if (rule := self._script.rule) is not None:
            return rule.score(self._tokenizer, input_ids, start, self._version, top)
        logprobs = scripted_logprobs(input_ids[start:], start, self._version)
        tops = _alternatives(input_ids[start:], logprobs, top, self._tokenizer.vocab_size)
        return PromptLogprobs(start, logprobs, self._version, top=tops)

    async def abort(self, request_id: str | None) -> int:
        told = [live for key, live in self._live.items() if request_id in (None, key) and not live.aborted.is_set()]
        for live in told:
            live.aborted.set()
        return len(told)

    async def pause(self, mode: PauseMode) -> None:
        self._running.clear()
        match mode:
            case PauseMode.ABORT:
                await self.abort(None)
            case PauseMode.KEEP:
                pass
            case _:
                assert_never(mode)

    async def resume(self) -> None:
        self._running.set()

    async def update_weights(self, path: Path, version: str) -> None:
        """Change the label without reading `path`. Raises `UnknownWeightVersion` for an unsettled label."""
        self.relabel(require_settled(version))

    def relabel(self, version: str) -> None:
        """Carry any `version`, as if another client changed the label."""
        self._version = version

    async def read_version(self) -> str:
        return self._version

    async def health(self) -> EngineHealth:
        return EngineHealth(ready=True, paused=not self._running.is_set(), running=len(self._live), waiting=0)

    async def count_sampled(self) -> EngineCount:
        return EngineCount("the scripted engine", self._since, self._said)

    def _next_step(self, request: GenerationRequest) -> ScriptStep:
        steps, session_id = self._script.steps, request.session_id or ""
        played = self._played[session_id]
        if request.continues:
            return replace(steps[(played - 1) % len(steps)], delay_s=0.0, fault=None)
        self._played[session_id] += 1
        return steps[played % len(steps)]

    def _ids(self, step: ScriptStep, request: GenerationRequest) -> list[int]:
        if request.script_ids is not None:
            return [int(each) for each in request.script_ids]
        ids = list(step.tokens) or self._tokenizer.encode(step.text)
        if not step.tokens and step.finish is FinishReason.STOP and self._tokenizer.eos_ids:
            ids.append(min(self._tokenizer.eos_ids))
        return ids[request.continues :]

    def _ending(self, step: ScriptStep, request: GenerationRequest) -> _Ending:
        input_ids, params = request.input_ids, request.params
        budget = min(params.max_new_tokens, self.capabilities.context_length - input_ids.size)
        ids = self._ids(step, request)
        stops = StopStrings(self._tokenizer.decode, params.stop, self._tokenizer.byte_ids)
        detector = None
        if self._repeat_guard is not None:
            detector = RepeatDetector(self._repeat_guard, object_key_ids(self._tokenizer))
            detector.seed(input_ids[input_ids.size - request.continues :].tolist())
        for position, token_id in enumerate(ids[:budget], start=1):
            matched = stops.push(token_id)
            if matched is not None or token_id in params.stop_token_ids:
                return _Ending(ids[:position], FinishReason.STOP, token_id if matched is None else matched)
            if position < budget and detector is not None and detector.push(token_id):
                return _Ending(ids[:position], FinishReason.REPEAT)
        if len(ids) > budget or request.script_ids is not None:
            return _Ending(ids[:budget], FinishReason.LENGTH)
        return _Ending(ids, step.finish, ids[-1] if ids and step.finish is FinishReason.STOP else None)

    async def _play(self, live: _Live, step: ScriptStep, ending: _Ending) -> AsyncIterator[GenerationDelta]:
        upto = len(ending.ids) if step.fault is None else min(step.fault_after, len(ending.ids))
        if await self._wait(live, step.delay_s):
            return
        while len(live.output) < upto:
            first = not live.output
            if not first and await self._wait(live, step.token_delay_s):
                return
            size = 1 if step.token_delay_s else upto
            delta = live.say(ending.ids[len(live.output) :][:size], self._version)
            self._said += delta.output_ids.size
            yield delta
        if step.fault is not None:
            await self._fail(live, step.fault)

    async def _wait(self, live: _Live, delay_s: float) -> bool:
        # True when aborted.
        if delay_s:
            await within(delay_s, live.aborted.wait())
        if not live.aborted.is_set() and not self._running.is_set():
            await await_any(live.aborted, self._running)
        return live.aborted.is_set()

    async def _fail(self, live: _Live, fault: ScriptedFault) -> None:
        match fault:
            case ScriptedFault.ABORT:
                live.aborted.set()
            case ScriptedFault.HANG:
                await live.aborted.wait()
            case ScriptedFault.DISCONNECT:
                raise EngineConnectionLost(f"the scripted connection broke after {len(live.output)} tokens")
            case ScriptedFault.UNAVAILABLE:
                error = EngineUnavailable("the scripted engine is unavailable in this step")
                error.may_have_sampled = bool(live.output)
                raise error
            case ScriptedFault.REJECT:
                raise EngineRejected("the scripted engine rejects this step")
            case _:
                assert_never(fault)


def _alternatives(ids: TokenIds, logprobs: Logprobs, count: int, vocab_size: int) -> TopLogprobs | None:
    if not count:
        return None
    # The token and its neighbors in the vocabulary, each one nat less likely.
    rank = np.arange(count, dtype=np.int32)
    return TopLogprobs((ids[:, None] + rank) % np.int32(vocab_size), logprobs[:, None] - rank.astype(np.float32))
