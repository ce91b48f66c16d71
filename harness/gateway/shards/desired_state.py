"""Messages between a front and a shard about the gate. Pure.

The front owns the holds. A shard follows the last state that it received, and stays closed until the first. Messages
carry the whole state, not the verb, so the next one makes up for a lost one.

Drains are the exception, because they change sessions. They are numbered, and a shard *owes* the last one until it
answers. Until then the front sends it a closed gate, whatever the front's gate is, so that no session created after the
drain is drained.
"""

from typing import Annotated

import msgspec

from harness.sessions.gate import Gate, Hold, HoldKind

SHUT_BY = "front"
"""Holder that keeps a shard closed until it has the state of its front."""

_FOR_EVER = float("inf")  # only the front expires holds

_Count = Annotated[int, msgspec.Meta(ge=0)]


class DesiredHold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    holder: str
    kind: HoldKind
    engines: bool = False


class DesiredState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gate state that a shard must follow."""

    epoch: _Count
    holds: tuple[DesiredHold, ...]
    drain: _Count = 0
    """Drain that the shard owes, or 0."""


class SentState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `PUT /sessions/shard`."""

    start: str
    """Id of one start of one front."""
    telling: _Count
    """Number of this message. A shard ignores one that arrives late."""
    standing: DesiredState


class ShardCounts(msgspec.Struct, frozen=True):
    sessions: int = 0
    sessions_open: int = 0
    turns_in_flight: int = 0
    turns_held: int = 0
    """Turns in flight that wait at the gate."""
    held: int = 0
    """Requests that wait at the gate."""
    sessions_closed: int = 0
    """Sessions that drains ended since the shard started, so that a lost answer loses none."""
    released: int = 0
    """Requests that opening the gate released, in the same way."""


class DesiredStateAnswer(msgspec.Struct, frozen=True):
    """The message in force, which may be a later one or another front's."""

    start: str
    telling: int
    counts: ShardCounts


def desired_state_of(gate: Gate, *, owes: int) -> DesiredState:
    """Return the state for a shard that owes drain `owes` (0 for none)."""
    holds = tuple(DesiredHold(hold.holder, hold.kind, hold.engines) for hold in gate.holds)
    if owes:
        holds = (*holds, DesiredHold(SHUT_BY, HoldKind.PAUSE))
    return DesiredState(gate.epoch, holds, owes)


def mirrored(standing: DesiredState) -> list[Hold]:
    """Convert `standing` for the gate of a shard."""
    return [Hold(hold.holder, hold.kind, _FOR_EVER, hold.engines) for hold in standing.holds]


AT_FIRST = DesiredState(0, (DesiredHold(SHUT_BY, HoldKind.PAUSE),))
"""State of a shard before its first message."""
