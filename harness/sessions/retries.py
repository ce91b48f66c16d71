"""Treatment of repeated requests: each call is answered at most once (I5).

A client that missed its answer and one that wants another sample send the same bytes. The earlier turn's standing, and
whether the client marks a retry, tell them apart.
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from harness.tokens.sent_body import SentBody
from harness.turn_ends import TurnStatus
from harness.types import Turn

_KEYED = "keyed"
_UNKEYED = "xxh3"


class RetryStanding(StrEnum):
    """State of the last turn with the same body."""

    UNKNOWN = "unknown"
    AWAITED = "awaited"
    """In flight; its client waits."""
    ABANDONED = "abandoned"
    """In flight; its client left."""
    BROKEN_OFF = "broken_off"
    """FAILED or suspended."""
    UNDELIVERED = "undelivered"
    DELIVERED = "delivered"


class Treatment(StrEnum):
    SAMPLE = "sample"
    JOIN = "join"
    """Wait for the turn, then look again."""
    CONTINUE = "continue"
    REPLAY = "replay"


TREATMENTS: Mapping[tuple[RetryStanding, bool], Treatment] = {
    # (standing, the client marks a retry)
    (RetryStanding.UNKNOWN, False): Treatment.SAMPLE,
    (RetryStanding.UNKNOWN, True): Treatment.SAMPLE,
    (RetryStanding.AWAITED, False): Treatment.SAMPLE,
    (RetryStanding.AWAITED, True): Treatment.JOIN,
    (RetryStanding.ABANDONED, False): Treatment.JOIN,
    (RetryStanding.ABANDONED, True): Treatment.JOIN,
    (RetryStanding.BROKEN_OFF, False): Treatment.CONTINUE,
    (RetryStanding.BROKEN_OFF, True): Treatment.CONTINUE,
    (RetryStanding.UNDELIVERED, False): Treatment.REPLAY,
    (RetryStanding.UNDELIVERED, True): Treatment.REPLAY,
    (RetryStanding.DELIVERED, False): Treatment.SAMPLE,
    (RetryStanding.DELIVERED, True): Treatment.REPLAY,
}


def standing(turn: Turn) -> RetryStanding:
    if turn.status is TurnStatus.FAILED or turn.is_suspended:
        return RetryStanding.BROKEN_OFF
    return RetryStanding.DELIVERED if turn.delivered else RetryStanding.UNDELIVERED


class CallParts(NamedTuple):
    """Parts that retries of a call share."""

    body: bytes
    dialect: str
    idempotency_key: str
    conversation: bytes
    """Exact digest (`tokens.history.Prefix.exact`)."""


def request_digest(parts: CallParts, sent: SentBody) -> str:
    """Return `keyed:`, the key and a keyed hash; equal for retries."""
    # The store keeps the key, so a retry is recognized after a restart. No client sees either. The dialect counts,
    # because the same bytes may mean something else in another one.
    whole = (sent.digest(len(parts.body)), parts.dialect.encode(), parts.idempotency_key.encode(), parts.conversation)
    framed = b"".join(len(part).to_bytes(8) + part for part in whole)
    return f"{_KEYED}:{sent.key.hex()}:{blake2b(framed, key=sent.key, digest_size=16).hexdigest()}"


def digest_kind(digest: str) -> str:
    """Return all before the last colon."""
    return digest.rpartition(":")[0]


def earlier_digests(kinds: Collection[str], parts: CallParts) -> list[str]:
    """Return the call's digests under older `kinds`."""
    if not kinds:
        return []
    from xxhash import xxh3_128

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
