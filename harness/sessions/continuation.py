"""From the engine requests of a turn to its output: what has been gathered so far, and what to ask for next.

A turn is one engine request when nothing interferes. When an engine cuts it short (a weight update, an abort nobody
asked for, a client that left and came back), the next request takes prompt + partial as its input, and the agent sees
one answer. Every segment keeps its own request id, its versions and its logprobs; nothing is sampled twice.

The joint between two requests is invisible to the agent, and nothing about it is visible to the engine, which takes the
partial for prompt. So whatever an engine decides by its own output is decided here by the output as a whole:

- A stop string may begin before the joint and end behind it. No engine sees that; it is looked for in all of the text,
  and what was sampled behind it is cut off and counted (`after_stop`).
- A partial may end with the very token that would have ended the turn (a stop id, the last of the budget), because an
  abort and the end crossed. Then there is nothing left to ask for, although the engine said `abort`.
- Budgets shrink by what is there, and the seed moves with the position: the same seed again would draw the same
  numbers for other tokens, and a request that is repeated has to sample the same tokens (I10).
- A grammar begins at the first token that an engine samples. A partial that follows one cannot be gone on from: it is
  discarded, and the turn begins again (`restarted`).
- A turn that says a step of a script has the rest of its ids left to say.
- A request may break instead of ending. What has arrived of it, and is known to be of which weights, is a partial like
  any other; the rest is counted (`unversioned`, `invalid_reply`), and what never arrived is `unknown`.
- The request reads the partial as input, so the engine can score it under the weights of now: that is how a token that
  was sampled before an update meets its next version (I7).

Pure: the server asks the engine, waits at the gate and decides when to give up.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from harness.sessions.ledger import DropReason
from harness.sessions.seeds import seed_of
from harness.tokens.incremental import StopStrings
from harness.types import (
    Discarded,
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    Logprobs,
    PromptLogprobs,
    SamplingParams,
    TokenIds,
    TopLogprobs,
    Turn,
    TurnSegment,
    UnknownOutput,
    VersionSpan,
    as_ids,
    as_logprobs,
)

_IDS_PER_CHARACTER = 4  # a character has at most four bytes
_RETRACTED = "retracted"  # why an engine that has answered did not hand over everything
_CONTEXT_IDS = 16  # decoders look at left neighbors; the first characters of a cut may be broken


class Endings(NamedTuple):
    """The ends of a model's own output."""

    eos_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    may_stop_early: bool = True
    """A stop string counts among the first `min_new_tokens` too."""
    byte_ids: frozenset[int] = frozenset()
    """See `Tokenizer.byte_ids`."""


class Broken(NamedTuple):
    """Why the end of a request was not heard."""

    reason: str
    """The code of the error."""
    drop: DropReason
    """Why tokens of it that have arrived are not usable."""


@dataclass(frozen=True, slots=True)
class Output:
    """All that the requests of a turn have produced.

    `finish` is None before the first request, and ABORT while there is more to come.
    """

    ids: TokenIds
    logprobs: Logprobs
    finish: FinishReason | None = None
    matched_stop: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    segments: tuple[TurnSegment, ...] = ()
    top_logprobs: TopLogprobs | None = None
    forced_tokens: int = 0
    cached_tokens: int = 0
    """Input tokens of the first request whose KV cache was reused."""
    discarded: tuple[Discarded, ...] = ()
    unknown: tuple[UnknownOutput, ...] = ()
    """Requests whose end was never heard."""
    scorings: tuple[PromptLogprobs, ...] = ()
    """Logprobs of input tokens, by absolute position, that came along with the requests."""
    searched: int = 0
    """How many tokens are known to complete no stop string."""

    @classmethod
    def nothing(cls) -> Self:
        """The output before the first request."""
        return cls(as_ids(()), as_logprobs(()))

    @classmethod
    def of_turn(cls, turn: Turn) -> Self:
        """Where a turn that broke off goes on from; of one that FAILED nothing is usable."""
        if not turn.is_suspended:
            last_request = turn.segments[-1].request_id if turn.segments else ""
            lost = Discarded(last_request, int(turn.output_ids.size), DropReason.FAILED_TURN)
            discarded = (*turn.discarded, *([lost] if lost.tokens else []))
            return cls(as_ids(()), as_logprobs(()), discarded=discarded, unknown=turn.unknown)
        return cls(
            turn.output_ids,
            turn.logprobs,
            FinishReason.ABORT if turn.segments else None,
            version_spans=turn.version_spans,
            segments=turn.segments,
            discarded=turn.discarded,
            unknown=turn.unknown,
        )

    @property
    def is_complete(self) -> bool:
        """The model, a limit or a guard ended it; nothing is left to ask for."""
        return self.finish is not None and self.finish is not FinishReason.ABORT

    def join(self, result: GenerationResult) -> Self:
        """This output with that of the next request behind it."""
        start = int(self.ids.size)
        end = start + int(result.output_ids.size)
        scored = () if result.prompt_logprobs is None else (result.prompt_logprobs,)
        lost = UnknownOutput(result.request_id, result.unheard_tokens, _RETRACTED)
        unheard = (lost,) if lost.at_most else ()
        before = self.version_spans
        spans = [replace(span, start=span.start + start, end=span.end + start) for span in result.version_spans]
        if before and spans and before[-1].version == spans[0].version:
            spans[0] = replace(spans[0], start=before[-1].start)
            before = before[:-1]
        top, more = self.top_logprobs, result.top_logprobs
        if start and top is not None and more is not None:
            more = TopLogprobs(np.concatenate([top.ids, more.ids]), np.concatenate([top.logprobs, more.logprobs]))
        elif start:
            more = None  # alternatives are not stored: a turn that is taken up after a restart has none before
        return replace(
            self,
            ids=as_ids(np.concatenate([self.ids, result.output_ids])) if start else result.output_ids,
            logprobs=as_logprobs(np.concatenate([self.logprobs, result.logprobs])) if start else result.logprobs,
            finish=result.finish_reason,
            matched_stop=result.matched_stop,
            version_spans=(*before, *spans),
            segments=(*self.segments, _segment(result, start, end)),
            top_logprobs=more,
            forced_tokens=result.forced_tokens,
            cached_tokens=self.cached_tokens if self.segments else result.cached_tokens,
            scorings=(*self.scorings, *scored),
            unknown=(*self.unknown, *unheard),
        )

    def join_broken(self, partial: GenerationResult, arrived: int, budget: int, cause: Broken) -> Self:
        """This output after a request whose end was not heard.

        It goes on behind `partial`, the usable part of the `arrived` tokens. The others are discarded, and for all we
        know the engine has sampled on until the `budget` of the request was used up. One that has said more than that
        is not believed, and has nothing left.
        """
        unusable = arrived - int(partial.output_ids.size)
        dropped = (Discarded(partial.request_id, unusable, cause.drop),) if unusable else ()
        joined = self.join(partial) if partial.output_ids.size else self
        return replace(
            joined,
            discarded=(*joined.discarded, *dropped),
            unknown=(*joined.unknown, UnknownOutput(partial.request_id, max(0, budget - arrived), cause.reason)),
        )

    def end_as_whole(self, params: SamplingParams, endings: Endings) -> Self:
        """This output, ended where it ends as a whole: an engine judges by the tokens of its own request only."""
        if self.finish is not FinishReason.ABORT and len(self.segments) <= 1:
            return self
        least = 0 if endings.may_stop_early else params.min_new_tokens
        match = first_stop_string(
            self.ids, params.stop, endings.decode, least=least, searched=self.searched, byte_ids=endings.byte_ids
        )
        if match is not None:
            return self._cut(match.end, match.text)
        searched = replace(self, searched=int(self.ids.size))
        if self.finish is not FinishReason.ABORT:
            return searched
        if self.ids.size:
            last = int(self.ids[-1])
            if last in params.stop_token_ids or (last in endings.eos_ids and not params.ignore_eos):
                return replace(searched, finish=FinishReason.STOP, matched_stop=last)
        if self.ids.size >= params.max_new_tokens:
            return replace(searched, finish=FinishReason.LENGTH)
        return searched

    def keep_or_restart(self, params: SamplingParams) -> Self:
        """The output that the next request goes on from; none of it when the turn follows a grammar.

        An engine would read a partial output as prompt, and follow the grammar from its beginning again.
        """
        if params.json_schema is None:
            return self
        lost = [Discarded(each.request_id, each.end - each.start, DropReason.RESTARTED) for each in self.segments]
        dropped = (*self.discarded, *(each for each in lost if each.tokens))
        return replace(self.nothing(), discarded=dropped, unknown=self.unknown, scorings=self.scorings)

    def next_request(
        self,
        prompt_ids: TokenIds,
        params: SamplingParams,
        *,
        request_id: str,
        session_id: str | None = None,
        prompt_logprobs_from: int | None = None,
        script_ids: TokenIds | None = None,
        on_delta: Callable[[GenerationDelta], None] | None = None,
        on_ids: Callable[[Sequence[int]], None] | None = None,
        write_prompt: Callable[[], bytes] | None = None,
    ) -> GenerationRequest:
        """Prompt and partial output as input, what is left of the bounds of `params`, and a seed of its own.

        Of the ids that the whole turn has to say, the request gets those that are not said yet. `write_prompt` writes
        `prompt_ids` as JSON.
        """
        done = int(self.ids.size)
        if done:
            prompt_ids = as_ids(np.concatenate([prompt_ids, self.ids]))
            params = replace(
                params,
                max_new_tokens=params.max_new_tokens - done,
                min_new_tokens=max(0, params.min_new_tokens - done),
                seed=None if params.seed is None else segment_seed(params.seed, done),
            )
        rest = None if script_ids is None else script_ids[done:]
        return GenerationRequest(
            prompt_ids,
            params,
            request_id,
            session_id,
            prompt_logprobs_from,
            continues=done,
            script_ids=rest,
            on_delta=on_delta,
            on_ids=on_ids,
            write_input=None if done else write_prompt,
        )

    def _cut(self, end: int, stop: str) -> Self:
        """The first `end` tokens; what came after the stop string is discarded."""
        over = int(self.ids.size) - end
        surplus = (Discarded(self.segments[-1].request_id, over, DropReason.AFTER_STOP),) if over else ()
        top = self.top_logprobs
        return replace(
            self,
            ids=self.ids[:end],
            logprobs=self.logprobs[:end],
            finish=FinishReason.STOP,
            matched_stop=stop,
            version_spans=tuple(
                replace(span, end=min(span.end, end)) for span in self.version_spans if span.start < end
            ),
            segments=tuple(replace(each, start=min(each.start, end), end=min(each.end, end)) for each in self.segments),
            top_logprobs=None if top is None else TopLogprobs(top.ids[:end], top.logprobs[:end]),
            forced_tokens=max(0, self.forced_tokens - over),
            discarded=(*self.discarded, *surplus),
        )


def _segment(result: GenerationResult, start: int, end: int) -> TurnSegment:
    times = (result.began_at, result.seconds, result.queued_s, result.worker)
    return TurnSegment(result.request_id, start, end, result.finish_reason, *times)


class StopMatch(NamedTuple):
    """A stop string in an output: it is complete with the token before `end`."""

    end: int
    text: str


def first_stop_string(
    ids: TokenIds,
    stop: Sequence[str],
    decode: Callable[[Sequence[int]], str],
    *,
    least: int = 0,
    searched: int = 0,
    byte_ids: Container[int] = (),
) -> StopMatch | None:
    """The first stop string that `ids` complete behind the first `least`, joints between requests included.

    The first `searched` ids are known to complete none: only those behind them are read, with as many before as a stop
    string that began there can have.
    """
    if not stop:
        return None
    start = max(0, searched - max(map(len, stop)) * _IDS_PER_CHARACTER - _CONTEXT_IDS)
    while start and int(ids[start]) in byte_ids:  # a run is one text
        start -= 1
    text = decode(ids[start:].tolist())
    is_final = "\N{REPLACEMENT CHARACTER}" not in text  # else bytes may have been a text until more came
    if is_final and not any(each in text for each in stop):
        return None
    # It is there, or nearly so: which token completes it is found by going through them one by one.
    strings = StopStrings(decode, stop, byte_ids)
    for position, token_id in enumerate(ids.tolist(), start=1):
        matched = strings.push(token_id)
        if matched is not None and position > least:
            return StopMatch(position, matched)
    return None


def segment_seed(turn_seed: int, position: int) -> int:
    """The seed of the request that goes on at output token `position`; that of the turn itself at 0.

    It depends on the position only, so a request that has to be repeated samples the same again (I10).
    """
    if position == 0:
        return turn_seed
    return seed_of(f"{turn_seed},{position}".encode())
