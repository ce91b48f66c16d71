"""`RepeatDetector` for many sequences at once, as tensors on the device of the logits.

A step is a fixed number of operations and reads nothing back to the host. Memory is `ngram_size` integers per row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from server_patch.repeat_terminate.config import RepeatTerminateConfig
from server_patch.repeat_terminate.detector import Rule, counted_key_ids, key_transitions

if TYPE_CHECKING:
    from torch import Tensor

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
        import torch  # seconds to import, and most engines use the pure detector

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
    def triggered(self) -> "Tensor":
        """Rows ended by a rule; bool [rows]."""
        return self.codes > 0

    def push(self, tokens: "Tensor") -> "Tensor":
        """Take the next tokens, int64 [rows]. Return `triggered`."""
        self._lengths += 1
        self._count_keys(tokens)
        self._count_runs(tokens)
        self._count_matches(tokens)
        self._steps += 1
        self._judge()
        return self.triggered

    def retire(self, rows: "Tensor") -> None:
        """Retire rows, bool [rows], that ended by themselves."""
        self.codes.masked_fill_(rows & (self.codes == 0), RETIRED)

    def _count_keys(self, tokens: "Tensor") -> None:
        if self._key_table.size:
            self._key_states = self._key_table.next_states(self._key_states, tokens)
            self._keys += self._key_states == self._key_table.size

    def _count_runs(self, tokens: "Tensor") -> None:
        self._runs.mul_(self._last == tokens).add_(1)
        self._last.copy_(tokens)

    def _count_matches(self, tokens: "Tensor") -> None:
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

    def _mark(self, open_rows: "Tensor", holds: "Tensor", rule: Rule) -> None:
        self.codes.masked_fill_(open_rows & holds, _CODE_OF[rule])


class _KeyTable:
    """`key_transitions` as a tensor [states, 1 + key tokens]; column 0 is for all other tokens."""

    def __init__(self, key_ids: tuple[int, ...], device: str) -> None:
        import torch  # see above

        alphabet = sorted(set(key_ids))
        rows = [[0, *(row[token] for token in alphabet)] for row in key_transitions(key_ids)]
        self.size = len(key_ids)
        self._alphabet = torch.tensor(alphabet, dtype=torch.int64, device=device)
        self._columns = torch.arange(1, len(alphabet) + 1, device=device)
        self._table = torch.tensor(rows, dtype=torch.int64, device=device)

    def next_states(self, states: "Tensor", tokens: "Tensor") -> "Tensor":
        columns = ((tokens[:, None] == self._alphabet) * self._columns).sum(dim=1)
        return self._table[states, columns]
