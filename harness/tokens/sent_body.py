"""A request body on its way through its reading: its bytes are digested once, from its beginning to its end.

The digest of a beginning is on the way to that of the whole. So the question whether a body begins with bytes that were
there before costs nothing besides, as long as questions come in the order of the bytes; one that goes back begins anew.

Digests are of xxHash, which is a hundred times faster than a cryptographic one. Whoever knows its seed can make two
bodies of one digest, and whoever does not can guess: so there are two of them, with seeds that no client learns, and
what decides by the digest of a whole body adds that of its conversation (`sessions.retries`).
"""

import xxhash

KEY_BYTES = 16
"""Of a key: a seed for each of the two."""


class SentBody:
    """The body of one request, and the key by which it is digested."""

    def __init__(self, content: bytes, key: bytes = bytes(KEY_BYTES)) -> None:
        self.content = content
        self.key = key
        self._hashes = self._new_hashes()
        self._digested = 0
        self._begins_with: tuple[int, bytes] | None = None

    def digest(self, size_bytes: int) -> bytes:
        """Digest of its first `size_bytes` bytes: twice XXH3-128."""
        if size_bytes < self._digested:
            self._hashes, self._digested = self._new_hashes(), 0
        with memoryview(self.content) as view:
            for each in self._hashes:
                each.update(view[self._digested : size_bytes])
        self._digested = size_bytes
        return b"".join(each.digest() for each in self._hashes)

    def begins_with(self, size_bytes: int, digest: bytes) -> bool:
        """Whether it has so many bytes, and the first ones have that digest; asked again, it is known."""
        if self._begins_with == (size_bytes, digest):
            return True
        found = size_bytes <= len(self.content) and self.digest(size_bytes) == digest
        if found:
            self._begins_with = (size_bytes, digest)
        return found

    def _new_hashes(self) -> list[xxhash.xxh3_128]:
        return [xxhash.xxh3_128(seed=int.from_bytes(half)) for half in (self.key[:8], self.key[8:])]
