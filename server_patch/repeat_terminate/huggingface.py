"""The repeat guard for `model.generate` of transformers, as a logits processor.

    guard = RepeatTerminateProcessor(config, eos_token_id=tokenizer.eos_token_id)
    output = model.generate(**inputs, logits_processor=[guard])
    guard.triggered  # one 0 or 1 per row

One processor serves one call, without beam search, which moves rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from transformers import LogitsProcessor

from server_patch.repeat_terminate.batched import RULE_CODES, BatchedRepeatDetector
from server_patch.repeat_terminate.config import ConfigError, RepeatTerminateConfig
from server_patch.repeat_terminate.detector import Rule

if TYPE_CHECKING:
    from torch import Tensor


_NOWHERE = -1


class RepeatTerminateProcessor(LogitsProcessor):  # type: ignore[misc]
    """Processor that forces the end-of-sequence token in rows that repeat themselves.

    Args:
        config: Rules; a disabled configuration does nothing.
        eos_token_id: End-of-sequence ids; the first is forced.
        object_key_ids: As for `RepeatDetector`.
        continues: Input ids at the end of every row that count as generated.
    """

    def __init__(
        self,
        config: RepeatTerminateConfig,
        *,
        eos_token_id: int | Sequence[int],
        object_key_ids: Sequence[int] | None = None,
        continues: int = 0,
    ) -> None:
        self._config = config
        self._eos_ids = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
        if not self._eos_ids:
            raise ConfigError("eos_token_id: expected at least one id to end a row with, got none")
        self._object_key_ids = object_key_ids
        self._continues = continues
        self._detector: BatchedRepeatDetector | None = None
        self._forced: Tensor | None = None
        self._length = 0

    @property
    def rules(self) -> list[Rule | None]:
        return [] if self._detector is None else [RULE_CODES.get(code) for code in self._detector.codes.tolist()]

    @property
    def triggered(self) -> list[int]:
        """1 per row that the guard ended, else 0; empty at first."""
        return [int(rule is not None) for rule in self.rules]

    @property
    def forced_columns(self) -> list[int | None]:
        """Column of each row's forced token in the output, or None; empty at first."""
        columns = [] if self._forced is None else self._forced.tolist()
        return [None if column == _NOWHERE else column for column in columns]

    def __call__(self, input_ids: "Tensor", scores: "Tensor") -> "Tensor":
        """Return the next scores; `input_ids` int64 [rows, length], `scores` [rows, vocabulary]."""
        if not self._config.enabled:
            return scores
        triggered = self._advanced(input_ids).triggered
        if self._forced is None:
            self._forced = input_ids.new_full(input_ids.shape[:1], _NOWHERE)
        self._forced.masked_fill_(triggered & (self._forced == _NOWHERE), input_ids.shape[1])
        forced = scores.new_full(scores.shape[1:], float("-inf"))
        forced[self._eos_ids[0]] = 0.0
        return scores.where(~triggered[:, None], forced)

    def _advanced(self, input_ids: "Tensor") -> BatchedRepeatDetector:
        rows, length = input_ids.shape
        if self._detector is None:
            detector = BatchedRepeatDetector(self._config, rows, self._object_key_ids, device=str(input_ids.device))
            new_tokens = self._continues
        else:
            detector, new_tokens = self._detector, 1
            if (rows, length) != (detector.codes.shape[0], self._length + 1):
                raise ValueError(
                    f"expected {detector.codes.shape[0]} rows of {self._length + 1} ids, one more than in the step"
                    f" before, got {rows} of {length}; a processor serves one call of generate, without beams"
                )
        for column in range(length - new_tokens, length):
            detector.retire(self._ends(input_ids[:, column]))
            detector.push(input_ids[:, column])
        self._detector, self._length = detector, length
        return detector

    def _ends(self, tokens: "Tensor") -> "Tensor":
        # What follows an end-of-sequence token in a row is padding.
        ends = tokens == self._eos_ids[0]
        for other in self._eos_ids[1:]:
            ends = ends | (tokens == other)
        return ends
