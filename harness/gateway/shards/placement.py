"""Choice of the shard with the fewest sessions for a new one. Pure.

The front adds the sessions placed since the last report, so that a burst does not all go to one shard. A takeover, or
an id chosen by the owner, fixes the shard.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from harness.decoding import json_decoder
from harness.errors import MalformedRequest
from harness.sessions.shard_ids import find_shard


def choose_shard(loads: Mapping[int, int]) -> int | None:
    """Return the shard with the least load, by number, the lowest number on a tie."""
    return min(loads, key=lambda number: (loads[number], number), default=None)


class Wish(NamedTuple):
    """Placement fields of a `POST /sessions` body."""

    fields: dict[str, msgspec.Raw]
    session_id: str | None
    """Id chosen by the owner."""
    resumes: str | None
    """Session to take over, which fixes the shard."""
    inherits: str | None = None
    """Session to inherit from, in the same way."""

    @property
    def is_repeatable(self) -> bool:
        """True if a retry may create another session."""
        return self.session_id is None and self.resumes is None and self.inherits is None

    def find_place(self, shards: int) -> int | None:
        """Return the only possible shard, or None for any. Raises `MalformedRequest`."""
        named = (self.session_id, self.resumes, self.inherits)
        places = {find_shard(each, shards) for each in named if each is not None}
        if len(places) > 1:
            raise MalformedRequest(
                "session_id: expected one whose first byte names the shard of the session that is resumed or inherited"
                " from, or none",
                param="session_id",
            )
        return places.pop() if places else None

    def with_id(self, session_id: str) -> bytes:
        return msgspec.json.encode({**self.fields, "session_id": session_id})


class _Earlier(msgspec.Struct):
    session_id: str | None = None


class _Places(msgspec.Struct):
    session_id: str | None = None
    resumes: str | None = None
    inherits: _Earlier | None = None


_fields = json_decoder(dict[str, msgspec.Raw])
_places = json_decoder(_Places)


def read_wish(body: bytes) -> Wish:
    """Parse `body`, which may be empty. Raises `MalformedRequest`; the shard checks the rest."""
    try:
        fields, places = _fields.decode(body or b"{}"), _places.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedRequest(f"expected a JSON object with session_id and resumes as texts: {error}") from error
    inherits = None if places.inherits is None else places.inherits.session_id
    return Wish(fields, places.session_id, places.resumes, inherits)
