"""At most once (I5): what a request means whose body this session has seen before.

A client that never got its answer sends the same bytes again; a client that wants another sample does too. They differ
in what became of the turn, and in whether the client says that it retries. The table is the whole policy.
"""

from collections.abc import Mapping
from enum import StrEnum
from hashlib import blake2b

from harness.tokens.sent_body import SentBody
from harness.turn_ends import TurnStatus
from harness.types import Turn

_KIND = "xxh3:"


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


def request_digest(body: SentBody, idempotency_key: str) -> str:
    """The same for two requests that are the same call: `xxh3:` and a digest of the body and the client's own key.

    The route is not part of it: a client that falls back to another dialect with the same bytes is answered from the
    turn that it has asked for already, in the words of the route it asks now.
    """
    return _KIND + body.digest_with(idempotency_key)


def is_older_digest(digest: str) -> bool:
    """It was made by a server from before there was `request_digest`, and is in the store since."""
    return not digest.startswith(_KIND)


def older_request_digest(body: bytes, idempotency_key: str) -> str:
    """What such a server made of the same call: blake2b-128."""
    key = b"\0" + idempotency_key.encode() if idempotency_key else b""
    return blake2b(body + key, digest_size=16).hexdigest()
