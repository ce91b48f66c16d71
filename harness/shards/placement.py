"""Which shard gets the next session: the one with the fewest. Pure.

Sessions are counted by the shards, which say now and then how many they have; what was placed since then counts on top,
so that a burst does not go to the one that happened to be empty when it was asked. A session that takes over from
another, or whose owner has chosen its id, has its place already.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from harness.errors import MalformedRequest
from harness.sessions.shard_ids import find_shard


class ShardLoad(NamedTuple):
    """A shard that serves, as its front knows it."""

    number: int
    sessions: int
    """That it had when it was asked last."""
    placed: int
    """Sessions that were placed on it since."""


def choose_shard(serving: Sequence[ShardLoad]) -> int | None:
    """The number of the shard with the fewest sessions, of several the first; None when none serves."""
    return min(serving, key=lambda load: (load.sessions + load.placed, load.number)).number if serving else None


class Wish(NamedTuple):
    """The body of a `POST /sessions`, as far as it concerns the place of the session."""

    fields: dict[str, msgspec.Raw]
    session_id: str | None
    """Chosen by its owner."""
    resumes: str | None
    """The session that it takes over from, which is on its shard."""

    @property
    def is_repeatable(self) -> bool:
        """Another session may be made in its place: nobody has chosen its id, and it takes nothing over."""
        return self.session_id is None and self.resumes is None

    def find_place(self, shards: int) -> int | None:
        """The number of the only shard that can have the session; None for any. Raises `MalformedRequest`."""
        places = {find_shard(each, shards) for each in (self.session_id, self.resumes) if each is not None}
        if len(places) > 1:
            raise MalformedRequest(
                "session_id: expected one whose first byte names the shard of the session that is resumed, or none",
                param="session_id",
            )
        return places.pop() if places else None

    def with_id(self, session_id: str) -> bytes:
        """The body for the shard, which gives the session that id."""
        return msgspec.json.encode({**self.fields, "session_id": session_id})


class _Places(msgspec.Struct):
    session_id: str | None = None
    resumes: str | None = None


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_places = msgspec.json.Decoder(_Places)


def read_wish(body: bytes) -> Wish:
    """The wish in `body`; an empty one wishes for nothing. Raises `MalformedRequest`; the shard checks the rest."""
    try:
        fields, places = _fields.decode(body or b"{}"), _places.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"expected a JSON object with session_id and resumes as texts: {error}") from error
    return Wish(fields, places.session_id, places.resumes)
