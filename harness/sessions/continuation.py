"""Assemble a turn's output from its engine requests, and build the next request.

Usually a turn is one engine request. If an engine cuts it short (a weight update, an unrequested abort, a client that
left and came back), the next request takes prompt + partial output as input, and the agent sees one answer. Every
segment keeps its request id, versions and logprobs. No token is sampled twice.

The engine takes the partial output for prompt, so what it decides from its own output is decided here from the whole:

- A stop string may span the joint. It is searched in the whole text; later tokens are cut off and counted
  (`after_stop`).
- An abort may cross with the end: a partial that ends with a stop id or uses up the budget is the whole.
- The next request gets the remaining budget, and a seed for its position: a repeated request must sample the same
  tokens (I10).
- Engines apply a grammar from their first token. A partial output under a grammar is discarded, and the turn starts
  over (`restarted`).
- A scripted turn has its remaining ids left to say.
- A broken request leaves the received tokens whose weights are known as a partial output. Other received tokens are
  counted (`unversioned`, `invalid_reply`); tokens that never arrived are `unknown`.
- The engine can score the partial output under the current weights, as input. That is how tokens sampled before an
  update meet their next version (I7).

Pure: the server calls the engine, waits at the gate and decides when to give up.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import NamedTuple, Self

import msgspec
import numpy as np

from harness.sessions.ledger import DropReason
from harness.sessions.seeds import seed_of
from harness.token_rows import RowState, TurnRows
from harness.tokens.incremental import StopStrings
from harness.top_logprobs import TopLogprobs
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
    Turn,
    TurnSegment,
    UnknownOutput,
    VersionSpan,
    as_ids,
    as_logprobs,
)

_IDS_PER_CHARACTER = 4  # a character has at most four bytes
_RETRACTED = "retracted"  # reason for tokens that a complete reply lacks
_CONTEXT_IDS = 16  # decoders look at left neighbors; the first characters of a cut may be broken


class Endings(NamedTuple):
    """End-of-turn rules of a model."""

    eos_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    may_stop_early: bool = True
    """Stop strings count before `min_new_tokens`."""
    byte_ids: frozenset[int] = frozenset()
    """See `Tokenizer.byte_ids`."""


class Broken(NamedTuple):
    """Cause of a broken request."""

    reason: str
    drop: DropReason


class Output(msgspec.Struct, frozen=True):
    """Output of all requests of a turn; `finish` is None before the first, and ABORT while more is to come."""

    ids: TokenIds
    logprobs: Logprobs
    finish: FinishReason | None = None
    matched_stop: int | str | None = None
    version_spans: tuple[VersionSpan, ...] = ()
    segments: tuple[TurnSegment, ...] = ()
    top_logprobs: TopLogprobs | None = None
    forced_tokens: int = 0
    cached_tokens: int = 0
    """First request only."""
    discarded: tuple[Discarded, ...] = ()
    unknown: tuple[UnknownOutput, ...] = ()
    scorings: tuple[PromptLogprobs, ...] = ()
    """Logprobs by absolute input position."""
    searched: int = 0
    """Leading tokens that complete no stop string."""
    rows: TurnRows | None = None
    """None if not recorded."""
    masks: TurnRows | None = None
    """None if not recorded."""

    @classmethod
    def nothing(cls) -> Self:
        """Return the output before the first request."""
        return cls(as_ids(()), as_logprobs(()))

    @classmethod
    def of_turn(cls, turn: Turn) -> Self:
        """Return what a broken-off turn continues; empty if it FAILED."""
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
            rows=turn.rows,
            masks=turn.masks,
        )

    @property
    def is_complete(self) -> bool:
        return self.finish is not None and self.finish is not FinishReason.ABORT

    def join(self, result: GenerationResult, missing_rows: RowState = RowState.NOT_RETURNED) -> Self:
        """Append the next request's output; `missing_rows` is the state of rows that it lacks."""
        start = int(self.ids.size)
        end = start + int(result.output_ids.size)
        rows, masks, stop = self.rows, self.masks, int(result.input_ids.size + result.output_ids.size)
        if result.output_ids.size:  # else it has explained no token: the next request asks for the same rows
            rows = rows and rows.join(result.rows, stop - 1, missing_rows)
            masks = masks and masks.join(result.masks, stop, missing_rows)
        scored = () if result.prompt_logprobs is None else (result.prompt_logprobs,)
        lost = UnknownOutput(result.request_id, result.unheard_tokens, _RETRACTED)
        unheard = (lost,) if lost.at_most else ()
        before = self.version_spans
        spans = list(result.version_spans)
        if start:
            spans = [replace(span, start=span.start + start, end=span.end + start) for span in spans]
        if before and spans and before[-1].version == spans[0].version:
            spans[0] = replace(spans[0], start=before[-1].start)
            before = before[:-1]
        top, more = self.top_logprobs, result.top_logprobs
        if start and top is not None and more is not None:
            more = TopLogprobs(np.concatenate([top.ids, more.ids]), np.concatenate([top.logprobs, more.logprobs]))
        elif start:
            more = None  # not stored: a turn that continues after a restart lacks the first ones
        return msgspec.structs.replace(
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
            rows=rows,
            masks=masks,
        )

    @property
    def missing_rows(self) -> dict[str, int]:
        """Count the missing rows of both kinds by state."""
        kinds = [Counter(each.missing) for each in (self.rows, self.masks) if each is not None]
        return dict(sum(kinds, Counter[str]())) if kinds else {}

    @property
    def row_bytes(self) -> int:
        return sum(each.size_bytes for each in (self.rows, self.masks) if each is not None)

    def rows_until(self, prompt_length: int) -> int:
        """Return the output tokens before the first missing row of either kind; 0 if none is missing."""
        if not self.missing_rows:
            return 0
        # A sample needs no row of its last token.
        gaps = [self.rows.gap + 1] if self.rows is not None else []
        gaps += [self.masks.gap] if self.masks is not None else []
        return max(0, min(gaps) - prompt_length)

    def join_broken(self, partial: GenerationResult, arrived: int, budget: int, cause: Broken) -> Self:
        """Append `partial`, the usable part of a broken request's `arrived` tokens."""
        unusable = arrived - int(partial.output_ids.size)
        dropped = (Discarded(partial.request_id, unusable, cause.drop),) if unusable else ()
        joined = self.join(partial, RowState.LOST) if partial.output_ids.size else self
        return msgspec.structs.replace(
            joined,
            discarded=(*joined.discarded, *dropped),
            # The engine may have used up its budget unheard. One that reported more than that has nothing left.
            unknown=(*joined.unknown, UnknownOutput(partial.request_id, max(0, budget - arrived), cause.reason)),
        )

    def end_as_whole(self, params: SamplingParams, endings: Endings) -> Self:
        """Apply stop strings, stop ids and budget to the whole output."""
        # The engine saw all of the output: its own end stands.
        if self.finish is not FinishReason.ABORT and len(self.segments) <= 1:
            return self
        least = 0 if endings.may_stop_early else params.min_new_tokens
        match = first_stop_string(
            self.ids, params.stop, endings.decode, least=least, searched=self.searched, byte_ids=endings.byte_ids
        )
        if match is not None:
            return self._cut(match.end, match.text)
        searched = msgspec.structs.replace(self, searched=int(self.ids.size))
        if self.finish is not FinishReason.ABORT:
            return searched
        if self.ids.size:
            last = int(self.ids[-1])
            if last in params.stop_token_ids or (last in endings.eos_ids and not params.ignore_eos):
                return msgspec.structs.replace(searched, finish=FinishReason.STOP, matched_stop=last)
        if self.ids.size >= params.max_new_tokens:
            return msgspec.structs.replace(searched, finish=FinishReason.LENGTH)
        return searched

    def keep_or_restart(self, params: SamplingParams) -> Self:
        """Discard the output under a grammar."""
        if params.json_schema is None:
            return self
        lost = [Discarded(each.request_id, each.end - each.start, DropReason.RESTARTED) for each in self.segments]
        dropped = (*self.discarded, *(each for each in lost if each.tokens))
        return msgspec.structs.replace(
            self.nothing(),
            discarded=dropped,
            unknown=self.unknown,
            scorings=self.scorings,
            rows=None if self.rows is None else TurnRows(self.rows.start),
            masks=None if self.masks is None else TurnRows(self.masks.start),
        )

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
        write_prompt: Callable[[], bytes | memoryview] | None = None,
    ) -> GenerationRequest:
        """Build the request for prompt + partial output."""
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
            rows_from=None if self.rows is None else self.rows.stop,
            on_delta=on_delta,
            on_ids=on_ids,
            write_input=None if done else write_prompt,
        )

    def _cut(self, end: int, stop: str) -> Self:
        over = int(self.ids.size) - end
        surplus = (Discarded(self.segments[-1].request_id, over, DropReason.AFTER_STOP),) if over else ()
        top = self.top_logprobs
        return msgspec.structs.replace(
            self,
            ids=self.ids[:end],
            logprobs=self.logprobs[:end],
            finish=FinishReason.STOP,
            matched_stop=stop,
            version_spans=tuple(
                replace(span, end=min(span.end, end)) for span in self.version_spans if span.start < end
            ),
            segments=tuple(replace(each, start=min(each.start, end), end=min(each.end, end)) for each in self.segments),
            top_logprobs=None if top is None else top.part(0, end),
            forced_tokens=max(0, self.forced_tokens - over),
            discarded=(*self.discarded, *surplus),
            rows=None if self.rows is None else self.rows.until(self.rows.stop - over),
            masks=None if self.masks is None else self.masks.until(self.masks.stop - over),
        )


def _segment(result: GenerationResult, start: int, end: int) -> TurnSegment:
    times = (result.began_at, result.seconds, result.queued_s, result.worker)
    return TurnSegment(result.request_id, start, end, result.finish_reason, *times)


class StopMatch(NamedTuple):
    """Stop string that the token before `end` completes."""

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
    """Return the first stop string completed after the first `least` ids. The first `searched` ids complete none."""
    if not stop:
        return None
    # Ids before `searched` matter only as far back as a stop string can begin.
    start = max(0, searched - max(map(len, stop)) * _IDS_PER_CHARACTER - _CONTEXT_IDS)
    while start and int(ids[start]) in byte_ids:  # a run of byte tokens is one text
        start -= 1
    text = decode(ids[start:].tolist())
    is_final = "\N{REPLACEMENT CHARACTER}" not in text  # else bytes may have been a text until more came
    if is_final and not any(each in text for each in stop):
        return None
    # A match, or nearly one: push the tokens one by one to find the one that completes it.
    strings = StopStrings(decode, stop, byte_ids)
    for position, token_id in enumerate(ids.tolist(), start=1):
        matched = strings.push(token_id)
        if matched is not None and position > least:
            return StopMatch(position, matched)
    return None


def segment_seed(turn_seed: int, position: int) -> int:
    """Return the seed for output token `position`; the turn's seed at 0."""
    # By position alone, so that a repeated request samples the same tokens (I10).
    if position == 0:
        return turn_seed
    return seed_of(f"{turn_seed},{position}".encode())
