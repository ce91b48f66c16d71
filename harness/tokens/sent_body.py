"""Request body whose bytes are digested once, from beginning to end.

The digest of a prefix is on the way to that of the whole. So checking whether a body begins with known bytes is free,
as long as the checks come in the order of the bytes.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import xxhash

KEY_BYTES = 16
"""One seed for each of two hashes."""


class SentBody:
    def __init__(self, content: bytes, key: bytes = bytes(KEY_BYTES)) -> None:
        self.content = content
        self.key = key
        self._hashes = self._new_hashes()
        self._digested = 0
        self._begins_with: tuple[int, bytes] | None = None

    def digest(self, size_bytes: int) -> bytes:
        """Return the digest of the first `size_bytes` bytes: twice XXH3-128."""
        if size_bytes < self._digested:
            self._hashes, self._digested = self._new_hashes(), 0
        with memoryview(self.content) as view:
            for each in self._hashes:
                each.update(view[self._digested : size_bytes])
        self._digested = size_bytes
        return b"".join(each.digest() for each in self._hashes)

    def begins_with(self, size_bytes: int, digest: bytes) -> bool:
        """Return True if the first `size_bytes` bytes have this digest. A match is cached."""
        if self._begins_with == (size_bytes, digest):
            return True
        found = size_bytes <= len(self.content) and self.digest(size_bytes) == digest
        if found:
            self._begins_with = (size_bytes, digest)
        return found

    def _new_hashes(self) -> "list[xxhash.xxh3_128]":
        import xxhash

        # A hundred times faster than a cryptographic hash. But a client that knows a seed can construct collisions, and
        # others can guess. So there are two hashes, with seeds that no client learns, and decisions by the digest of a
        # whole body add its conversation's (`sessions.retries`).
        return [xxhash.xxh3_128(seed=int.from_bytes(half)) for half in (self.key[:8], self.key[8:])]
