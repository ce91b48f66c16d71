"""At most once (I5): what a request means whose body this session has seen before.

A client that never got its answer sends the same bytes again; a client that wants another sample does too. They differ
in what became of the turn, and in whether the client says that it retries. The table is the whole policy.

The same bytes in another dialect are another request: they may say something else there.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from xxhash import xxh3_128

from harness.tokens.sent_body import SentBody
from harness.turn_ends import TurnStatus
from harness.types import Turn

_KEYED = "keyed"
_UNKEYED = "xxh3"


class Standing(StrEnum):
    """Where the last turn stands that was asked for with the same body."""

    UNKNOWN = "unknown"
    """There is none."""
    AWAITED = "awaited"
    """In flight, and its client waits for it."""
    ABANDONED = "abandoned"
    """In flight; its client has left."""
    BROKEN_OFF = "broken_off"
    """It FAILED, or was suspended with a partial output."""
    UNDELIVERED = "undelivered"
    """It has an outcome that nobody was handed."""
    DELIVERED = "delivered"
    """Its answer was handed over completely."""


class Treatment(StrEnum):
    """The way to treat the request."""

    SAMPLE = "sample"
    """A turn of its own; a sibling when there is an earlier one."""
    JOIN = "join"
    """Wait for the turn in flight, then look again."""
    CONTINUE = "continue"
    """Take up the turn where it broke off."""
    REPLAY = "replay"
    """The stored answer."""


TREATMENTS: Mapping[tuple[Standing, bool], Treatment] = {
    # (standing, the client says that it retries)
    (Standing.UNKNOWN, False): Treatment.SAMPLE,
    (Standing.UNKNOWN, True): Treatment.SAMPLE,
    (Standing.AWAITED, False): Treatment.SAMPLE,
    (Standing.AWAITED, True): Treatment.JOIN,
    (Standing.ABANDONED, False): Treatment.JOIN,
    (Standing.ABANDONED, True): Treatment.JOIN,
    (Standing.BROKEN_OFF, False): Treatment.CONTINUE,
    (Standing.BROKEN_OFF, True): Treatment.CONTINUE,
    (Standing.UNDELIVERED, False): Treatment.REPLAY,
    (Standing.UNDELIVERED, True): Treatment.REPLAY,
    (Standing.DELIVERED, False): Treatment.SAMPLE,
    (Standing.DELIVERED, True): Treatment.REPLAY,
}


def standing(turn: Turn) -> Standing:
    """Where a turn that has an outcome stands."""
    if turn.status is TurnStatus.FAILED or turn.is_suspended:
        return Standing.BROKEN_OFF
    return Standing.DELIVERED if turn.delivered else Standing.UNDELIVERED


class CallParts(NamedTuple):
    """What two requests have in common that are the same call."""

    body: bytes
    dialect: str
    idempotency_key: str
    """The client's own; empty where it has none."""
    conversation: bytes
    """Digest of its tools and messages, to the letter (`tokens.history.Prefix.exact`)."""


def request_digest(parts: CallParts, sent: SentBody) -> str:
    """The same for two requests that are the same call: `keyed:`, the key and a keyed hash; `sent` is the body.

    The key goes with it into the store, so a retry is known after a restart. No client sees either.
    """
    whole = (sent.digest(len(parts.body)), parts.dialect.encode(), parts.idempotency_key.encode(), parts.conversation)
    framed = b"".join(len(part).to_bytes(8) + part for part in whole)
    return f"{_KEYED}:{sent.key.hex()}:{blake2b(framed, key=sent.key, digest_size=16).hexdigest()}"


def digest_kind(digest: str) -> str:
    """How a digest was made: everything before its last colon."""
    return digest.rpartition(":")[0]


def earlier_digests(kinds: Iterable[str], parts: CallParts) -> list[str]:
    """What earlier servers have made of the same call: with another key, or of the body alone."""
    bare = b"\0".join((parts.body, *filter(None, (parts.idempotency_key.encode(),))))
    found = []
    for kind in kinds:
        name, _, key = kind.partition(":")
        if name == _KEYED:
            found.append(request_digest(parts, SentBody(parts.body, bytes.fromhex(key))))
        elif name == _UNKEYED:
            found.append(f"{_UNKEYED}:{xxh3_128(bare).hexdigest()}")
        else:
            found.append(blake2b(bare, digest_size=16).hexdigest())
    return found
