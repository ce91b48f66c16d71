"""The token ids of one branch, growing at its end only.

A conversation of a hundred thousand tokens is not copied for each turn (I11): consecutive turns share one growing
array and differ in how much of it they see. Views handed out stay valid for ever, because what has been written is
never written again.

What an engine is sent of it is kept as well: the ids as JSON, from the second time on that somebody asks for them (a
prompt that nothing goes on from is asked for once), and the state of their digest. A turn then costs what its own ids
cost. Both can be made again from the ids.
"""

from hashlib import blake2b
from typing import Self

import msgspec
import numpy as np

from harness.types import TokenIds

_FIRST_CAPACITY = 256


class TokenLog:
    """An append-only int32 array with amortised constant cost per token."""

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self.length = 0
        self._is_sent_again = False
        self._text = bytearray()
        self._written = 0
        """Ids that are in the text, each with a comma behind it."""
        self._hash = blake2b(digest_size=16)
        self._hashed = 0

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

    def json(self, length: int) -> bytes:
        """The first `length` ids as a JSON array."""
        if not self._is_sent_again:
            self._is_sent_again = True
            return msgspec.json.encode(self._ids[:length].tolist())
        if length >= self._written:
            self._text += _text(self._ids[self._written : length])
            self._written = length
            end = len(self._text)
        else:  # a shorter path of the same log: a sibling, or a turn that is taken up again
            end = len(self._text) - len(_text(self._ids[length : self._written]))
        with memoryview(self._text) as text:
            return b"".join((b"[", text[: max(0, end - 1)], b"]"))

    def digest(self, length: int) -> str:
        """blake2b-128 of the little-endian int32 bytes of the first `length` ids."""
        if length < self._hashed:
            return blake2b(_bytes(self._ids[:length]), digest_size=16).hexdigest()
        self._hash.update(_bytes(self._ids[self._hashed : length]))
        self._hashed = length
        return self._hash.copy().hexdigest()

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

    def json(self) -> bytes:
        """All ids of the path as a JSON array."""
        return self._log.json(self.length)

    def digest(self) -> str:
        """blake2b-128 of all ids of the path, as little-endian int32."""
        return self._log.digest(self.length)

    def cut(self, length: int) -> "TokenPath":
        """The first `length` ids of this path; shares memory."""
        return TokenPath(self._log, length)

    def extend(self, ids: TokenIds) -> "TokenPath":
        """This path with `ids` after it; shares memory unless another turn has grown from here already."""
        log = self._log if self._log.length == self.length else self._log.fork(self.length)
        log.append(ids)
        return TokenPath(log, log.length)


def _text(ids: TokenIds) -> bytes:
    return msgspec.json.encode(ids.tolist())[1:-1] + b"," if ids.size else b""


def _bytes(ids: TokenIds) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()
