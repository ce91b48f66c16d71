"""What a front tells a shard about its gate, and what the shard answers. Pure.

The holds of the gate belong to the front. A shard keeps none: it stands as it was told last, and a shard that comes up
is shut until it has been told. The state is told, not the verb: whatever was lost on the way, the next telling makes up
for it.

A drain is the exception, because it changes sessions. Drains are numbered, and a shard *owes* the last one until it has
answered it. As long as it does it is told a shut gate, whatever the gate is by now: so no session that began after the
drain is ever taken for one from before it.
"""

from typing import Annotated

import msgspec

from harness.sessions.gate import Gate, Hold, HoldKind

SHUT_BY = "front"
"""The holder that keeps a shard shut until it stands as its front does."""

_FOR_EVER = float("inf")  # a hold runs out at the front, and nowhere else

_Count = Annotated[int, msgspec.Meta(ge=0)]


class StandingHold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hold on the gate of the front, as a shard has to know it."""

    holder: str
    kind: HoldKind
    engines: bool = False


class Standing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a shard has to stand."""

    epoch: _Count
    """Of the gate of the front."""
    holds: tuple[StandingHold, ...]
    drain: _Count = 0
    """The number of the drain that the shard owes; 0 for none."""


class ToldStanding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `PUT /sessions/shard`."""

    start: str
    """Which front this is, and which of its starts; each has a count of its own."""
    telling: _Count
    """Counts its tellings to one shard: one that comes late, behind a later one, does nothing."""
    standing: Standing


class ShardCounts(msgspec.Struct, frozen=True):
    """What a shard holds, and what a telling touched."""

    sessions: int = 0
    sessions_open: int = 0
    turns_in_flight: int = 0
    turns_held: int = 0
    """Those of the turns in flight that wait at the gate to be continued."""
    held: int = 0
    """Requests that wait at the gate."""
    sessions_closed: int = 0
    """Sessions that this drain ended."""
    released: int = 0
    """Requests that this telling let go on."""


class StandingAnswer(msgspec.Struct, frozen=True):
    """The answer to a telling: which one is in force, which may be a later one or somebody else's."""

    start: str
    telling: int
    counts: ShardCounts


def standing_of(gate: Gate, *, owes: int) -> Standing:
    """How a shard has to stand that owes drain `owes`, 0 for none, when the front's gate is `gate`."""
    holds = tuple(StandingHold(hold.holder, hold.kind, hold.engines) for hold in gate.holds)
    if owes:
        holds = (*holds, StandingHold(SHUT_BY, HoldKind.PAUSE))
    return Standing(gate.epoch, holds, owes)


def mirrored(standing: Standing) -> list[Hold]:
    """The holds of `standing` for the gate of a shard."""
    return [Hold(hold.holder, hold.kind, _FOR_EVER, hold.engines) for hold in standing.holds]


AT_FIRST = Standing(0, (StandingHold(SHUT_BY, HoldKind.PAUSE),))
"""How a shard stands that nobody has told anything."""
