"""Token ids of one branch, append-only. Turns share one growing array (I11); views of it stay valid."""

from hashlib import blake2b
from typing import Self

import msgspec
import numpy as np

from harness.types import TokenIds

_FIRST_CAPACITY = 256


class TokenLog:
    """Append-only int32 array with amortized constant cost per token."""

    def __init__(self) -> None:
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int32)
        self.length = 0
        self._is_sent_again = False
        self._text = bytearray(b"[]")
        self._written = 0
        """Ids in the text."""
        self._hash = blake2b(digest_size=16)
        self._hashed = 0

    def append(self, ids: TokenIds) -> None:
        end = self.length + ids.size
        if end > self._ids.size:
            grown = np.empty(max(end, 2 * self._ids.size), dtype=np.int32)
            grown[: self.length] = self._ids[: self.length]
            self._ids = grown
        self._ids[self.length : end] = ids
        self.length = end

    def view(self, length: int) -> TokenIds:
        """Return a read-only view, without copying."""
        ids = self._ids[:length]
        ids.flags.writeable = False
        return ids

    def json(self, length: int) -> bytes | memoryview:
        """Return the first `length` ids as JSON. A view is not copied: the text is longer than all else of a turn."""
        # A prompt without successor is sent once, so its text is kept from the second request on.
        if not self._is_sent_again:
            self._is_sent_again = True
            return _json(self._ids[:length])
        if length < self._written:  # a shorter path of the same log: a sibling, or a continued turn
            behind = len(_json(self._ids[length : self._written])) - len("[]")
            return bytes(self._text[: max(len("["), len(self._text) - len(",]") - behind)] + b"]")
        if length > self._written:
            more = (b"," if self._written else b"") + _json(self._ids[self._written : length])[1:]
            try:
                self._text[-1:] = more
            except BufferError:  # a request in flight reads it
                self._text = self._text[:-1] + more
            self._written = length
        return memoryview(self._text)

    def digest(self, length: int) -> str:
        """Return blake2b-128 of little-endian int32."""
        if length < self._hashed:
            return blake2b(_bytes(self._ids[:length]), digest_size=16).hexdigest()
        self._hash.update(_bytes(self._ids[self._hashed : length]))
        self._hashed = length
        return self._hash.copy().hexdigest()

    def fork(self, length: int) -> Self:
        """Return an independent copy."""
        other = type(self)()
        other.append(self._ids[:length])
        return other


class TokenPath:
    """Prompt and output ids up to the end of one turn."""

    __slots__ = ("_log", "length")

    def __init__(self, log: TokenLog, length: int) -> None:
        self._log = log
        self.length = length

    @classmethod
    def empty(cls) -> Self:
        return cls(TokenLog(), 0)

    @property
    def ids(self) -> TokenIds:
        """Read-only."""
        return self._log.view(self.length)

    def json(self) -> bytes | memoryview:
        return self._log.json(self.length)

    def digest(self) -> str:
        return self._log.digest(self.length)

    def cut(self, length: int) -> "TokenPath":
        """Return a prefix; shares memory."""
        return TokenPath(self._log, length)

    def extend(self, ids: TokenIds) -> "TokenPath":
        """Return this path plus `ids`; shares memory if nothing extends it yet."""
        log = self._log if self._log.length == self.length else self._log.fork(self.length)
        log.append(ids)
        return TokenPath(log, log.length)


def _json(ids: TokenIds) -> bytes:
    return msgspec.json.encode(ids.tolist())


def _bytes(ids: TokenIds) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()
