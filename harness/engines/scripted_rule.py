"""Rule of a scripted teacher: a known distribution over next tokens, which needs no weights."""

import re
from itertools import chain

import msgspec
import numpy as np

from harness.tokens.alignment import Spelled
from harness.tokens.tokenizer import Tokenizer
from harness.top_logprobs import TopLogprobs
from harness.types import PromptLogprobs, TokenIds, as_logprobs

_SURE = 0.999  # probability of the expected id; all others share the rest


class ScriptRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """After each match of `after`, expects the ids of `say`, one per token, whatever was sampled instead."""

    after: str
    """Regular expression for the text up to an answer."""
    say: tuple[str, ...]
    """Pieces of the answer, with groups of the match as `\\1`, each encoded alone; the end-of-turn id follows."""

    def __post_init__(self) -> None:
        try:
            re.sub(self.after, "".join(self.say), "")  # reads both
        except re.error as error:
            raise ValueError(f"expected a regular expression and its groups: {error}") from None

    def score(self, tokenizer: Tokenizer, ids: TokenIds, start: int, version: str, top: int) -> PromptLogprobs:
        """Return logprobs of `ids[start:]`; before the first match all ids are equally likely."""
        size, rank = tokenizer.vocab_size, np.arange(top, dtype=np.int32)
        expected = self._expected(tokenizer, ids)[start:]
        sure, other = np.where(expected < 0, 1 / size, [[_SURE], [(1 - _SURE) / (size - 1)]])
        logprobs = as_logprobs(np.log(np.where(ids[start:] == expected, sure, other)))
        tops = np.log(np.where(rank, other[:, None], sure[:, None])).astype(np.float32)
        likely = (expected.clip(0)[:, None] + rank) % np.int32(size)
        return PromptLogprobs(start, logprobs, version, top=TopLogprobs(likely, tops) if top else None)

    def _expected(self, tokenizer: Tokenizer, ids: TokenIds) -> TokenIds:
        text, ends = Spelled.of(tokenizer, ids.tolist())[1:]
        reached = np.maximum.accumulate([0, *(end or 0 for end in ends)])
        end_id, expected = min(tokenizer.eos_ids), np.full(ids.size, -1, np.int32)
        for match in re.finditer(self.after, text):
            answer = expected[np.searchsorted(reached, match.end()) :]
            pieces = (tokenizer.encode(match.expand(piece)) for piece in self.say)
            said = [*chain.from_iterable(pieces)][: answer.size]
            answer[: len(said)], answer[len(said) :] = said, end_id
        return expected
