"""The counters of the detector over a whole sequence at once, one array each.

Token by token in Python a long output costs microseconds a token: in an engine's scheduler, for each sequence
that goes on after an update. numpy is there wherever an engine is; it is imported when the first long sequence comes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Columns(NamedTuple):
    """Element t is the counter after token t."""

    runs: "npt.NDArray[np.int64]"
    """Equal tokens in a row."""
    matches: "npt.NDArray[np.int64]"
    """Tokens in a row that equal the one `ngram_size` before them."""
    keys: "npt.NDArray[np.int64]"
    """Occurrences of the object key so far."""


def columns_of(tokens: Sequence[int], ngram_size: int, key_ids: Sequence[int]) -> Columns:
    """The counters of `tokens`; without an `ngram_size` or `key_ids` theirs stay 0."""
    import numpy as np

    ids = np.asarray(tokens, dtype=np.int64)
    is_repeated = np.zeros(ids.size, dtype=bool)
    is_repeated[1:] = ids[1:] == ids[:-1]
    is_match = np.zeros(ids.size, dtype=bool)
    if ngram_size:
        is_match[ngram_size:] = ids[ngram_size:] == ids[:-ngram_size]
    ends_key = np.zeros(ids.size, dtype=bool)
    if 0 < len(key_ids) <= ids.size:
        starts = ids.size - len(key_ids) + 1
        ends_key[len(key_ids) - 1 :] = np.logical_and.reduce(
            [ids[i : i + starts] == key_id for i, key_id in enumerate(key_ids)]
        )
    return Columns(1 + _in_a_row(is_repeated), _in_a_row(is_match), np.cumsum(ends_key, dtype=np.int64))


def _in_a_row(holds: Any) -> Any:
    """For how many elements, up to each one, `holds` has been true without a break."""
    import numpy as np

    index = np.arange(holds.size, dtype=np.int64)
    return index - np.maximum.accumulate(np.where(holds, -1, index)) if holds.size else index
