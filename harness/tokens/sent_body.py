"""A request body on its way through its reading: its bytes are digested once, from its beginning to its end.

The digest of a beginning is on the way to that of the whole. So the question whether a body begins with bytes that were
there before costs nothing besides, as long as questions come in the order of the bytes; one that goes back begins anew.

Digests are of xxHash, which is a hundred times faster than a cryptographic one, and no secret: a client that makes two
bodies of one digest gets its own earlier answer for the second, and deceives nobody else.
"""

import xxhash


class SentBody:
    """The body of one request."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._hash = xxhash.xxh3_128()
        self._digested = 0
        self._begins_with: tuple[int, bytes] | None = None

    def digest(self, size_bytes: int) -> bytes:
        """XXH3-128 of its first `size_bytes` bytes."""
        self._digest(size_bytes)
        return self._hash.digest()

    def begins_with(self, size_bytes: int, digest: bytes) -> bool:
        """Whether it has so many bytes, and the first ones have that XXH3-128; asked again, it is known."""
        if self._begins_with == (size_bytes, digest):
            return True
        found = size_bytes <= len(self.content) and self.digest(size_bytes) == digest
        if found:
            self._begins_with = (size_bytes, digest)
        return found

    def digest_with(self, key: str) -> str:
        """XXH3-128 of all its bytes, and of `key` behind them when there is one; hexadecimal."""
        self._digest(len(self.content))
        whole = self._hash
        if key:
            whole = whole.copy()
            whole.update(b"\0" + key.encode())
        return whole.hexdigest()

    def _digest(self, size_bytes: int) -> None:
        if size_bytes < self._digested:
            self._hash, self._digested = xxhash.xxh3_128(), 0
        with memoryview(self.content) as view:
            self._hash.update(view[self._digested : size_bytes])
        self._digested = size_bytes
