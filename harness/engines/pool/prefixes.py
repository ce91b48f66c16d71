"""Which workers have the beginning of a prompt in their caches, by what they were sent: pure, no clock and no I/O.

A prompt is cut into blocks, and the key of a block stands for all tokens up to its end. So the longest beginning that
some worker was sent is the last block with a known key. What a worker evicted since is not known here: a wrong guess
costs the prefill that any other worker would have needed, too.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from xxhash import xxh3_64_intdigest

from harness.types import TokenIds

_BLOCK = 64
_REMEMBERED_BLOCKS = 1 << 16
_WORTH = 0.5  # of a prompt; less is what all prompts share, such as the template's own words

_W = TypeVar("_W")


def block_keys(prompt: TokenIds) -> tuple[int, ...]:
    """The keys of the whole blocks of `prompt`, int32 of shape (tokens,)."""
    keys, key = [], 0
    for start in range(0, prompt.size - _BLOCK + 1, _BLOCK):
        key = xxh3_64_intdigest(prompt[start : start + _BLOCK].tobytes(), key)
        keys.append(key)
    return tuple(keys)


class PrefixMap(Generic[_W]):
    """The workers that were sent each block; the blocks that were asked for least recently are forgotten."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, tuple[_W, ...]] = OrderedDict()

    def note(self, keys: Sequence[int], worker: _W) -> None:
        """Remember that `worker` was sent a prompt with these keys."""
        for key in keys:
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if worker in holders else (*holders, worker)
        while len(self._holders) > _REMEMBERED_BLOCKS:
            self._holders.popitem(last=False)

    def holders(self, keys: Sequence[int]) -> tuple[_W, ...]:
        """The workers with the longest known beginning, none where that is less than half of the prompt."""
        for index in range(len(keys) - 1, -1, -1):
            if index + 1 < _WORTH * len(keys):
                break
            if holders := self._holders.get(keys[index]):
                return holders
        return ()
