"""Counters of the detector over a whole sequence at once.

Python would cost microseconds per token in the scheduler, for each sequence that continues after an update.
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
    """Tokens in a row equal to the one `ngram_size` before."""
    keys: "npt.NDArray[np.int64]"
    """Occurrences of the object key so far."""


def columns_of(tokens: Sequence[int], ngram_size: int, key_ids: Sequence[int]) -> Columns:
    """Count over `tokens`; disabled counters stay 0."""
    import numpy as np  # every engine has it; short sequences do without

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
    import numpy as np

    # Distance to the last element where `holds` is false.
    index = np.arange(holds.size, dtype=np.int64)
    return index - np.maximum.accumulate(np.where(holds, -1, index)) if holds.size else index
