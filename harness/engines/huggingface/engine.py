"""Continuous batching over one model: each `step` advances every live request.

Single-threaded and synchronous; `thread.py` runs it. Changes happen only between two steps. New weights invalidate all
KV; paused sequences recompute theirs, so every logprob is exact for the weights of its label.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from harness.engines.base import PauseMode
from harness.engines.huggingface.local_generation import LocalGeneration, StopRules
from harness.engines.huggingface.model import RaggedModel
from harness.engines.huggingface.sampling import SamplingRow, logprobs_of, sample, top_of
from harness.engines.huggingface.scheduler import Scheduler, StepPiece
from harness.engines.huggingface.scheduler import Sequence as TokenSequence
from harness.errors import EngineError, EngineRejected, EngineReplyInvalid
from harness.token_rows import RowValues
from harness.types import (
    FinishReason,
    GenerationDelta,
    GenerationRequest,
    GenerationResult,
    PromptLogprobs,
    as_ids,
    as_logprobs,
)

RequestOutcome = GenerationResult | PromptLogprobs | EngineError


class Listener(Protocol):
    """Receives the events of one request on the engine's thread; must neither block nor raise."""

    @property
    def wants_deltas(self) -> bool:
        """True to receive tokens as they are sampled, besides the outcome."""

    def __call__(self, event: GenerationDelta | RequestOutcome) -> None:
        """Take the next event; a `RequestOutcome` is the last."""


@dataclass(frozen=True, slots=True, eq=False)
class _LiveRequest:
    generation: LocalGeneration
    listener: Listener


class LocalEngine:
    def __init__(self, model: RaggedModel, scheduler: Scheduler, rules: StopRules, *, version: str) -> None:
        self.version = version
        self.facts, self.context_length = model.facts, rules.context_length
        self.is_paused = False
        self.sampled_tokens = 0
        self._model = model
        self._scheduler = scheduler
        self._rules = rules
        self._live: dict[str, _LiveRequest] = {}
        self._by_tokens: dict[TokenSequence, _LiveRequest] = {}

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """True if `step` would compute something."""
        return self._scheduler.has_work and not self.is_paused

    def submit(self, request: GenerationRequest, listener: Listener) -> None:
        """Queue a request. Raises `EngineRejected` if its id is live."""
        if request.request_id in self._live:
            raise EngineRejected(f"request id {request.request_id} is in use; every request needs a fresh one")
        live = _LiveRequest(LocalGeneration(request, self._rules, started_at=time.perf_counter()), listener)
        self._live[request.request_id] = live
        self._by_tokens[live.generation.tokens] = live
        self._scheduler.add(live.generation.tokens)

    def abort(self, request_id: str | None) -> int:
        """Abort one generation or all, but no scoring. Return how many ended."""
        named = self._live.values() if request_id is None else filter(None, [self._live.get(request_id)])
        generations = [live for live in named if not live.generation.is_scoring_only]
        for live in generations:
            self._finish(live, FinishReason.ABORT)
        return len(generations)

    def drop(self, request: GenerationRequest) -> None:
        """Discard a request whose caller has gone."""
        live = self._live.get(request.request_id)
        if live is not None and live.generation.request is request:
            self._remove(live)

    def pause(self, mode: PauseMode) -> None:
        """Stop sampling; `ABORT` also ends all generations, waiting ones too."""
        self.is_paused = True
        if mode is PauseMode.ABORT:
            self.abort(None)

    def resume(self) -> None:
        self.is_paused = False

    def update_weights(self, path: Path, version: str) -> None:
        """Load the checkpoint in `path`. Raises `EngineRejected`, with nothing changed."""
        self._model.load_weights(path)
        self.version = version
        self._forget_kv()

    def flush_cache(self) -> bool:
        """See `FlushesPrefixes`; drops the KV of paused requests too."""
        if self._live and not self.is_paused:
            return False
        self._forget_kv()
        return True

    def fail_all(self, error: EngineError) -> None:
        for live in list(self._live.values()):
            self._end(live, error)

    def step(self) -> None:
        """Compute the next piece of every running request and report the results."""
        pieces = self._scheduler.plan()
        self._model.apply(self._scheduler.take_kv_ops())
        experts = self._room_for_experts(pieces)
        logits = self._model.forward(pieces, experts)
        self._scheduler.complete(pieces)
        self._keep_experts(pieces, experts)
        try:
            self._use_logits(pieces, logits)
        except EngineReplyInvalid as error:
            for piece in pieces:
                if (live := self._by_tokens.get(piece.sequence)) is not None:
                    self._end(live, error)

    def _forget_kv(self) -> None:
        self._scheduler.forget_kv()
        self._model.apply(self._scheduler.take_kv_ops())
        for live in self._live.values():
            live.generation.restart_reading()

    def _room_for_experts(self, pieces: Sequence[StepPiece]) -> RowValues | None:
        shape = self.facts.routed_experts
        if shape is None or all(piece.sequence.rows_from is None for piece in pieces):
            return None
        tokens = sum(piece.stop - piece.start for piece in pieces)
        return np.zeros((tokens, shape.layers, shape.top_k), shape.dtype)

    def _keep_experts(self, pieces: Sequence[StepPiece], experts: RowValues | None) -> None:
        if experts is None:
            return
        first = 0
        for piece in pieces:
            last = first + piece.stop - piece.start
            self._by_tokens[piece.sequence].generation.add_rows(piece.start, experts[first:last].copy())
            first = last

    def _use_logits(self, pieces: Iterable[StepPiece], logits: Tensor) -> None:
        # `logits` has the wanted rows of all pieces, in order.
        sampling: list[_LiveRequest] = []
        last_rows: list[int] = []
        first = 0
        for piece in pieces:
            live, wanted = self._by_tokens[piece.sequence], piece.wanted
            rows = logits[first : first + len(wanted)]
            first += len(wanted)
            if not live.generation.is_scoring_only and piece.stop == piece.sequence.length:
                sampling.append(live)
                last_rows.append(first - 1)
            self._score(live, wanted, rows)
        if not sampling:
            return
        how = [
            SamplingRow(own.request.params, own.seed, own.tokens.length, own.forbidden, own.told)
            for own in (live.generation for live in sampling)
        ]
        for live, sampled in zip(sampling, sample(logits[last_rows], how), strict=True):
            self.sampled_tokens += 1
            reason = live.generation.add(sampled, self.version)
            if live.listener.wants_deltas:
                live.listener(GenerationDelta(as_ids([sampled.token_id]), as_logprobs([sampled.logprob])))
            if reason is not None:
                self._finish(live, reason)

    def _score(self, live: _LiveRequest, wanted: range, rows: Tensor) -> None:
        generation = live.generation
        if generation.scores is None or generation.scores.is_complete or not wanted:
            return
        # The logits of a position score the token after it.
        targets = generation.request.input_ids[wanted.start + 1 : wanted.stop + 1]
        count = generation.request.params.top_logprobs if generation.is_scoring_only else 0
        top = top_of(rows[: targets.size], count) if count else None
        generation.add_scores(logprobs_of(rows[: targets.size], targets), self.version, top)
        if generation.is_scoring_only and (scores := generation.scores.result()) is not None:
            self._end(live, scores)

    def _finish(self, live: _LiveRequest, reason: FinishReason) -> None:
        self._end(live, live.generation.result(reason, now=time.perf_counter()))

    def _end(self, live: _LiveRequest, outcome: RequestOutcome) -> None:
        self._remove(live)
        live.listener(outcome)

    def _remove(self, live: _LiveRequest) -> None:
        del self._live[live.generation.request.request_id]
        del self._by_tokens[live.generation.tokens]
        self._scheduler.finish(live.generation.tokens)
