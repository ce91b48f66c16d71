"""The repeat guard for `model.generate` of transformers, as a logits processor.

    guard = RepeatTerminateProcessor(config, eos_token_id=tokenizer.eos_token_id)
    output = model.generate(**inputs, logits_processor=[guard])
    guard.triggered  # one 0 or 1 per row

One processor serves one call, without beam search, which moves rows. A step is a fixed number of operations on the
device of the logits and reads nothing back to the host. Memory is `ngram_size` integers per row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from server_patch.repeat_terminate.config import ConfigError, RepeatTerminateConfig
from server_patch.repeat_terminate.detector import Rule, counted_key_ids, key_transitions

RULE_CODES = dict(enumerate(Rule, start=1))
"""Rules by `BatchedRepeatDetector.codes` value; 0 is no rule."""

RETIRED = -1
"""Code of a row that ended by itself."""

_CODE_OF = {rule: code for code, rule in RULE_CODES.items()}
_NO_TOKEN = -1


class BatchedRepeatDetector:
    """State of `rows` sequences. Every `push` takes one token of each, so ended rows must be retired."""

    def __init__(
        self,
        config: RepeatTerminateConfig,
        rows: int,
        object_key_ids: Sequence[int] | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        self._config = config
        self._steps = 0
        self._lengths, self._runs, self._matched, self._keys, self._key_states = torch.zeros(
            (5, rows), dtype=torch.int64, device=device
        )
        self._last = torch.full((rows,), _NO_TOKEN, device=device)
        self._window = torch.full((config.ngram_size if config.ngram_matches else 0, rows), _NO_TOKEN, device=device)
        self._key_table = _KeyTable(counted_key_ids(config, object_key_ids), device)
        self.codes = torch.zeros(rows, dtype=torch.int64, device=device)
        """`RULE_CODES` key, 0 or `RETIRED`; int64 [rows]."""

    @property
    def triggered(self) -> Tensor:
        """Rows ended by a rule; bool [rows]."""
        return self.codes > 0

    def push(self, tokens: Tensor) -> Tensor:
        """Take the next tokens, int64 [rows]. Return `triggered`."""
        self._lengths += 1
        self._count_keys(tokens)
        self._count_runs(tokens)
        self._count_matches(tokens)
        self._steps += 1
        self._judge()
        return self.triggered

    def retire(self, rows: Tensor) -> None:
        """Retire rows, bool [rows], that ended by themselves."""
        self.codes.masked_fill_(rows & (self.codes == 0), RETIRED)

    def _count_keys(self, tokens: Tensor) -> None:
        if self._key_table.size:
            self._key_states = self._key_table.next_states(self._key_states, tokens)
            self._keys += self._key_states == self._key_table.size

    def _count_runs(self, tokens: Tensor) -> None:
        self._runs.mul_(self._last == tokens).add_(1)
        self._last.copy_(tokens)

    def _count_matches(self, tokens: Tensor) -> None:
        if self._config.ngram_matches:
            window = self._window[self._steps % self._config.ngram_size]
            self._matched.add_(1).mul_(window == tokens)
            window.copy_(tokens)

    def _judge(self) -> None:
        # In reverse order of `Rule`, so that the first rule that holds is written last.
        config = self._config
        open_rows = (self.codes == 0) & (self._lengths >= config.min_new_tokens)
        if config.ngram_matches:
            self._mark(open_rows, self._matched >= config.ngram_matches, Rule.NGRAM)
        if config.max_consecutive_token_repeats:
            self._mark(open_rows, self._runs >= config.max_consecutive_token_repeats, Rule.CONSECUTIVE)
        if config.max_object_keys is not None:
            self._mark(open_rows, self._keys >= config.max_object_keys, Rule.OBJECT_KEYS)

    def _mark(self, open_rows: Tensor, holds: Tensor, rule: Rule) -> None:
        self.codes.masked_fill_(open_rows & holds, _CODE_OF[rule])


class _KeyTable:
    """`key_transitions` as a tensor [states, 1 + key tokens]; column 0 is for all other tokens."""

    def __init__(self, key_ids: tuple[int, ...], device: str) -> None:
        alphabet = sorted(set(key_ids))
        rows = [[0, *(row[token] for token in alphabet)] for row in key_transitions(key_ids)]
        self.size = len(key_ids)
        self._alphabet = torch.tensor(alphabet, dtype=torch.int64, device=device)
        self._columns = torch.arange(1, len(alphabet) + 1, device=device)
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)

    def next_states(self, states: Tensor, tokens: Tensor) -> Tensor:
        columns = ((tokens[:, None] == self._alphabet) * self._columns).sum(dim=1)
        return self._table[states, columns]


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

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
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

    def _advanced(self, input_ids: Tensor) -> BatchedRepeatDetector:
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

    def _ends(self, tokens: Tensor) -> Tensor:
        # What follows an end-of-sequence token in a row is padding.
        ends = tokens == self._eos_ids[0]
        for other in self._eos_ids[1:]:
            ends = ends | (tokens == other)
        return ends
