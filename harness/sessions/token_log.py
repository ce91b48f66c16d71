"""The token ids of one branch, growing at its end only.

A conversation of a hundred thousand tokens is not copied for each turn (I11): consecutive turns share one growing
array and differ in how much of it they see. Views handed out stay valid for ever, because what has been written is
never written again.
"""

from typing import Self

import numpy as np

from harness.types import TokenIds

_FIRST_CAPACITY = 256


class TokenLog:
    """An append-only int32 array with amortised constant cost per token."""

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self.length = 0

    def append(self, ids: TokenIds) -> None:
        """Add `ids` at the end."""
        end = self.length + ids.size
        if end > self._ids.size:
            grown = np.empty(max(end, 2 * self._ids.size), dtype=np.int32)
            grown[: self.length] = self._ids[: self.length]
            self._ids = grown
        self._ids[self.length : end] = ids
        self.length = end

    def view(self, length: int) -> TokenIds:
        """The first `length` ids, read-only, without copying."""
        ids = self._ids[:length]
        ids.flags.writeable = False
        return ids

    def fork(self, length: int) -> Self:
        """A log of its own that starts with the first `length` ids."""
        other = type(self)()
        other.append(self._ids[:length])
        return other


class TokenPath:
    """The prompt and output ids up to the end of one turn: a log and how much of it belongs to the turn."""

    __slots__ = ("_log", "length")

    def __init__(self, log: TokenLog, length: int) -> None:
        self._log = log
        self.length = length

    @classmethod
    def empty(cls) -> Self:
        """The path before the first turn."""
        return cls(TokenLog(), 0)

    @property
    def ids(self) -> TokenIds:
        """All ids of the path, read-only."""
        return self._log.view(self.length)

    def cut(self, length: int) -> "TokenPath":
        """The first `length` ids of this path; shares memory."""
        return TokenPath(self._log, length)

    def extend(self, ids: TokenIds) -> "TokenPath":
        """This path with `ids` after it; shares memory unless another turn has grown from here already."""
        log = self._log if self._log.length == self.length else self._log.fork(self.length)
        log.append(ids)
        return TokenPath(log, log.length)
