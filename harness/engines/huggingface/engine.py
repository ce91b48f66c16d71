"""Continuous batching over one model: every live request advances a little with each `step`.

Single-threaded and synchronous; `thread.py` gives it a thread of its own. Whatever changes the engine happens between
two steps, so an abort, a pause or new weights fall between two sampled tokens and never into one.

New weights invalidate all KV. Sequences that are frozen in the middle of an output compute theirs again, so that every
logprob is exactly what the labeled weights say of that token.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from harness.engines.base import PauseMode
from harness.engines.huggingface.local_generation import LocalGeneration, StopRules
from harness.engines.huggingface.model import ModelFacts, RaggedModel
from harness.engines.huggingface.sampling import SamplingRow, logprobs_of, sample
from harness.engines.huggingface.scheduler import Scheduler, StepPiece
from harness.engines.huggingface.scheduler import Sequence as TokenSequence
from harness.errors import EngineError, EngineRejected, EngineReplyInvalid
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
"""How a request ends."""


class Listener(Protocol):
    """Receives the events of one request on the engine's thread; must neither block nor raise."""

    @property
    def wants_deltas(self) -> bool:
        """Whether to report tokens as they are sampled; the outcome is reported in any case."""

    def __call__(self, event: GenerationDelta | RequestOutcome) -> None:
        """Take the next event; a `RequestOutcome` is the last."""


@dataclass(frozen=True, slots=True, eq=False)
class _LiveRequest:
    """A request that has not ended."""

    generation: LocalGeneration
    listener: Listener


class LocalEngine:
    """The requests, and the model that works on them."""

    def __init__(self, model: RaggedModel, scheduler: Scheduler, rules: StopRules, *, version: str) -> None:
        self.version = version
        self.is_paused = False
        self.sampled_tokens = 0
        """Since the engine was made, for whichever request."""
        self._model = model
        self._scheduler = scheduler
        self._rules = rules
        self._live: dict[str, _LiveRequest] = {}
        self._by_tokens: dict[TokenSequence, _LiveRequest] = {}

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model."""
        return self._model.facts

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its output together, at most."""
        return self._rules.context_length

    @property
    def running(self) -> int:
        """Generations with a place in the batch."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Generations without a place in the batch."""
        return len(self._scheduler.waiting)

    @property
    def kv_bytes(self) -> int:
        """Memory in use for keys and values."""
        return self._model.kv.size_bytes

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return self._scheduler.has_work and not self.is_paused

    def submit(self, request: GenerationRequest, listener: Listener) -> None:
        """Queue a request; raises `EngineRejected` when its id is that of a live one."""
        if request.request_id in self._live:
            raise EngineRejected(f"request id {request.request_id} is in use; every request needs a fresh one")
        live = _LiveRequest(LocalGeneration(request, self._rules, started_at=time.perf_counter()), listener)
        self._live[request.request_id] = live
        self._by_tokens[live.generation.tokens] = live
        self._scheduler.add(live.generation.tokens)

    def abort(self, request_id: str | None) -> int:
        """End one generation or all; requests that only score are not generations. Returns how many ended."""
        named = self._live.values() if request_id is None else filter(None, [self._live.get(request_id)])
        generations = [live for live in named if not live.generation.is_scoring_only]
        for live in generations:
            self._finish(live, FinishReason.ABORT)
        return len(generations)

    def drop(self, request: GenerationRequest) -> None:
        """Forget a request whose caller is gone; nothing happens when it has ended or never was accepted."""
        live = self._live.get(request.request_id)
        if live is not None and live.generation.request is request:
            self._remove(live)

    def pause(self, mode: PauseMode) -> None:
        """Sample nothing until `resume`; with `ABORT` generations end now, waiting ones included."""
        self.is_paused = True
        if mode is PauseMode.ABORT:
            self.abort(None)

    def resume(self) -> None:
        """Sample again. Idempotent."""
        self.is_paused = False

    def update_weights(self, path: Path, version: str) -> None:
        """Sample with the checkpoint in `path` from now on; raises `EngineRejected`, nothing changed, if it cannot."""
        self._model.load_weights(path)
        self.version = version
        self._forget_kv()

    def flush_cache(self) -> bool:
        """Forget cached prefixes, and of paused requests what is computed; False, nothing changed, while some run."""
        if self._live and not self.is_paused:
            return False
        self._forget_kv()
        return True

    def fail_all(self, error: EngineError) -> None:
        """End every request with `error`."""
        for live in list(self._live.values()):
            self._end(live, error)

    def step(self) -> None:
        """Compute the next piece of every running request, and report what came of it."""
        pieces = self._scheduler.plan()
        self._model.apply(self._scheduler.take_kv_ops())
        logits = self._model.forward(pieces)
        self._scheduler.complete(pieces)
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
            live.generation.restart_scores()

    def _use_logits(self, pieces: Iterable[StepPiece], logits: Tensor) -> None:
        """Score and sample with the wanted rows of `pieces`, which `logits` has in order."""
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
        """Add the logprobs of the input tokens that follow the positions `wanted`."""
        generation = live.generation
        if generation.scores is None or generation.scores.is_complete or not wanted:
            return
        targets = generation.request.input_ids[wanted.start + 1 : wanted.stop + 1]
        generation.add_scores(logprobs_of(rows[: targets.size], targets), self.version)
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
