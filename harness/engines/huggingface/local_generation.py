"""One request from arrival to result. Knows neither tensors nor threads: the engine adds scores and tokens."""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from harness.engines.huggingface.scheduler import Sequence as TokenSequence
from harness.token_rows import MaskIds, RaggedRows, RowValues, TokenRows
from harness.tokens.incremental import StopStrings
from harness.top_logprobs import TopLogprobs
from harness.types import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    Logprobs,
    PromptLogprobs,
    VersionSpan,
    as_ids,
    as_logprobs,
)
from server_patch.repeat_terminate import RepeatDetector

_SEED_BITS = 63


class StopRules(NamedTuple):
    """Reasons to end a generation besides its own parameters."""

    eos_ids: frozenset[int]
    context_length: int
    decode: Callable[[Sequence[int]], str]
    new_detector: Callable[[], RepeatDetector | None] = lambda: None
    """Creates the repeat guard's state for one output; None without a guard."""
    byte_ids: frozenset[int] = frozenset()
    """See `Tokenizer.byte_ids`."""


class SampledToken(NamedTuple):
    """Sampled token; alternatives and mask only if requested."""

    token_id: int
    logprob: float
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    mask: Sequence[int] | MaskIds = ()
    """Candidates, the token among them."""


class PromptScores:
    """Logprobs of input tokens from `start` on, added in chunks."""

    def __init__(self, start: int, end: int) -> None:
        self.start = start
        self._values = np.zeros(end - start, dtype=np.float32)
        self._tops: list[dict[str, TopLogprobs]] = []
        self._filled = 0
        self._version: str | None = None

    @property
    def is_complete(self) -> bool:
        return self._version is not None

    def add(self, logprobs: Logprobs, version: str, top: TopLogprobs | None) -> None:
        self._tops.append({} if top is None else {"": top})
        self._values[self._filled : self._filled + logprobs.size] = logprobs
        self._filled += logprobs.size
        if self._filled == self._values.size:
            self._version = version

    def restart(self) -> None:
        """Discard an incomplete array: all values must be of one version."""
        self._filled = 0
        self._tops.clear()

    def result(self) -> PromptLogprobs | None:
        if self._version is None:
            return None
        top = TopLogprobs.join(self._tops, [len(top.ids) for each in self._tops for top in each.values()]).get("")
        return PromptLogprobs(self.start, as_logprobs(self._values), self._version, top=top)


class LocalGeneration:
    """Live request; a budget of 0 tokens only scores its input."""

    def __init__(self, request: GenerationRequest, rules: StopRules, *, started_at: float) -> None:
        self.request = request
        self._rules = rules
        self._started_at = started_at
        params, start = request.params, request.prompt_logprobs_from
        self.seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        self.scores = None if start is None else PromptScores(start, self.prompt_length)
        # Scoring alone needs no logits after the last input token.
        known = self.prompt_length - (1 if self.is_scoring_only else 0)
        room = min(params.max_new_tokens, rules.context_length - self.prompt_length)
        buffer = np.empty(self.prompt_length + room, dtype=np.int32)
        buffer[: self.prompt_length] = request.input_ids
        logits_from = known - 1 if self.scores is None else self.scores.start - 1
        self.tokens = TokenSequence(buffer, known, logits_from, request.session_id, rows_from=request.rows_from)
        self._rows: list[RowValues] = []
        self.sampled: list[SampledToken] = []
        self._versions: list[VersionSpan] = []
        self._stop_strings = StopStrings(rules.decode, params.stop, rules.byte_ids)
        self._matched_stop: int | str | None = None
        self._detector = rules.new_detector()
        if self._detector is not None:
            # The output began in an earlier request when this one continues it.
            self._detector.seed(request.input_ids[self.prompt_length - request.continues :].tolist())

    @property
    def prompt_length(self) -> int:
        return int(self.request.input_ids.size)

    @property
    def is_scoring_only(self) -> bool:
        return self.request.params.max_new_tokens == 0

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Ids that would end the output before its minimum length."""
        params = self.request.params
        if len(self.sampled) >= params.min_new_tokens:
            return ()
        return (*params.stop_token_ids, *(() if params.ignore_eos else self._rules.eos_ids))

    @property
    def told(self) -> int | None:
        """Next id of the script; None after the last, or without one."""
        script_ids, said = self.request.script_ids, len(self.sampled)
        return int(script_ids[said]) if script_ids is not None and said < script_ids.size else None

    def add_scores(self, logprobs: Logprobs, version: str, top: TopLogprobs | None = None) -> None:
        if self.scores is not None and not self.scores.is_complete:
            self.scores.add(logprobs, version, top)
            self.tokens.logits_from += logprobs.size

    def add_rows(self, start: int, values: RowValues) -> None:
        """Add the experts of the tokens from `start` on; a token that is read again keeps the first ones."""
        if self.tokens.rows_from is not None:
            self._rows.append(values[self.tokens.rows_from - start :])
            self.tokens.rows_from = max(self.tokens.rows_from, start + len(values))

    def restart_reading(self) -> None:
        """Read the input again after a weight change, unless its scores and rows are complete."""
        if not self.sampled:
            self._rows, self.tokens.rows_from = [], self.request.rows_from
        if self.scores is not None and not self.scores.is_complete:
            self.scores.restart()
            self.tokens.logits_from = self.scores.start - 1

    def add(self, sampled: SampledToken, version: str) -> FinishReason | None:
        """Append a sampled token; return why the generation ends here, or None."""
        position, token_id, params = len(self.sampled), sampled.token_id, self.request.params
        self.sampled.append(sampled)
        self.tokens.append(token_id)
        if self._versions and self._versions[-1].version == version:
            position = self._versions.pop().start
        self._versions.append(VersionSpan(version, position, len(self.sampled)))

        matched_string = self._stop_strings.push(token_id)
        ends_turn = token_id in self._rules.eos_ids and not params.ignore_eos
        self._matched_stop = token_id if ends_turn or token_id in params.stop_token_ids else matched_string
        if self._matched_stop is not None:
            return FinishReason.STOP
        if self.tokens.length == self.tokens.ids.size:
            return FinishReason.LENGTH
        if self._detector is not None and self._detector.push(token_id):
            return FinishReason.REPEAT
        return None

    def result(self, reason: FinishReason, *, now: float) -> GenerationResult:
        """Return the output so far, ended by `reason`."""
        top, masks = None, RaggedRows.of(self.prompt_length, [sampled.mask for sampled in self.sampled])
        if self.request.params.top_logprobs:
            shape = (len(self.sampled), self.request.params.top_logprobs)
            ids = np.array([sampled.top_ids for sampled in self.sampled], dtype=np.int32)
            logprobs = np.array([sampled.top_logprobs for sampled in self.sampled], dtype=np.float32)
            top = TopLogprobs(ids.reshape(shape), logprobs.reshape(shape))
        return GenerationResult(
            request_id=self.request.request_id,
            input_ids=self.request.input_ids,
            output_ids=as_ids([sampled.token_id for sampled in self.sampled]),
            logprobs=as_logprobs([sampled.logprob for sampled in self.sampled]),
            finish_reason=reason,
            version_spans=tuple(self._versions),
            matched_stop=self._matched_stop,
            top_logprobs=top,
            prompt_logprobs=self.scores.result() if self.scores else None,
            masks=masks if self.request.params.sampling_mask else None,
            rows=self._joined_rows(),
            cached_tokens=self.tokens.cached_tokens or 0,
            seconds=now - self._started_at,
        )

    def _joined_rows(self) -> TokenRows | None:
        start = self.request.rows_from
        return TokenRows(start, np.concatenate(self._rows)) if start is not None and self.sampled else None
