"""Map from prompt prefixes to the workers that were sent them. Pure: no clock, no I/O.

A block's key covers all tokens up to its end, so the longest known prefix is the last block with a known key.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from harness.types import TokenIds

_BLOCK = 64
_REMEMBERED_BLOCKS = 1 << 16
_WORTH = 0.5  # of a prompt; less is what all prompts share, such as the template's text

_W = TypeVar("_W")


def block_keys(prompt: TokenIds) -> tuple[int, ...]:
    """Return the keys of the whole blocks of `prompt`, int32 of shape (tokens,)."""
    from xxhash import xxh3_64_intdigest

    keys, key = [], 0
    for start in range(0, prompt.size - _BLOCK + 1, _BLOCK):
        key = xxh3_64_intdigest(prompt[start : start + _BLOCK].tobytes(), key)
        keys.append(key)
    return tuple(keys)


class PrefixMap(Generic[_W]):
    """Workers that were sent each block; evicts the least recently used."""

    def __init__(self) -> None:
        # Evictions in workers are not known; a wrong guess costs one prefill, as with any worker.
        self._holders: OrderedDict[int, tuple[_W, ...]] = OrderedDict()

    def note(self, keys: Sequence[int], worker: _W) -> None:
        for key in keys:
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if worker in holders else (*holders, worker)
        while len(self._holders) > _REMEMBERED_BLOCKS:
            self._holders.popitem(last=False)

    def holders(self, keys: Sequence[int]) -> tuple[_W, ...]:
        """Return the workers with the longest known prefix; none if it is under half of the prompt."""
        for index in range(len(keys) - 1, -1, -1):
            if index + 1 < _WORTH * len(keys):
                break
            if holders := self._holders.get(keys[index]):
                return holders
        return ()
