"""Gate in front of a server's sessions, and the holds that close it.

The gate is as closed as its strongest hold: draining over paused over open. So an abort that ends cannot open it under
a weight update, and a pause never softens a drain. A hold ends on release or when its time runs out, so a dead
controller cannot block the server for long.

A hold may cover the engines, which its holder pauses. If it ends without a report that they continue, they are *left*:
only the server can continue them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated

import msgspec

from harness.errors import EnginesHeld, HoldExpired, HoldNotFound

ANONYMOUS = "anonymous"
NAMED_TTL_S = 60.0
"""Default duration of a named hold, which the holder may renew."""
ANONYMOUS_TTL_S = 3600.0
"""Default duration of an anonymous hold, which is not renewed."""

_REMEMBERED = 1000  # expired holders; each is a name


class GateState(StrEnum):
    OPEN = "open"
    PAUSED = "paused"
    """New work waits, for a bounded time."""
    DRAINING = "draining"
    """No new sessions; open ones accept no further turn."""


class HoldKind(StrEnum):
    PAUSE = "pause"
    DRAIN = "drain"


class Work(StrEnum):
    """Kind of arriving work."""

    CREATE = "create"
    TURN = "turn"
    CONTINUATION = "continuation"
    """Next request of a turn in flight."""


class GateAnswer(StrEnum):
    SERVE = "serve"
    HOLD = "hold"
    """Wait; 503 with Retry-After after too long."""
    REFUSE = "refuse"
    """503 with Retry-After."""


GATE_TABLE: Mapping[tuple[GateState, Work], GateAnswer] = {
    (GateState.OPEN, Work.CREATE): GateAnswer.SERVE,
    (GateState.OPEN, Work.TURN): GateAnswer.SERVE,
    (GateState.OPEN, Work.CONTINUATION): GateAnswer.SERVE,
    (GateState.PAUSED, Work.CREATE): GateAnswer.HOLD,
    (GateState.PAUSED, Work.TURN): GateAnswer.HOLD,
    (GateState.PAUSED, Work.CONTINUATION): GateAnswer.HOLD,
    (GateState.DRAINING, Work.CREATE): GateAnswer.REFUSE,
    # The session decides: a drained one answers 404 for good.
    (GateState.DRAINING, Work.TURN): GateAnswer.SERVE,
    (GateState.DRAINING, Work.CONTINUATION): GateAnswer.SERVE,
}


@dataclass(frozen=True, slots=True)
class Hold:
    """One holder's demand on the gate."""

    holder: str
    kind: HoldKind
    until: float
    """Unix seconds."""
    engines: bool = False
    """The holder pauses this server's engines."""
    work: str = ""
    """Server's own work for the holder, resumed after a restart; only it continues the engines."""


_Holder = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class RenewRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/renew`."""

    holder: _Holder = ANONYMOUS
    ttl_s: Annotated[float, msgspec.Meta(ge=0.05, le=86_400)] | None = None

    @property
    def lasts_s(self) -> float:
        """Seconds that the hold lasts without renewal."""
        return self.ttl_s or (ANONYMOUS_TTL_S if self.holder == ANONYMOUS else NAMED_TTL_S)


class HoldRequest(RenewRequest, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/pause` and `POST /sessions/drain`."""

    engines: bool = False


class ReleaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of `POST /sessions/resume`."""

    holder: _Holder = ANONYMOUS
    engines_continued: bool = False


class HoldReport(msgspec.Struct, frozen=True):
    """Hold, as clients see it."""

    holder: str
    kind: HoldKind
    engines: bool = False
    ends_in_s: float = 0.0


class GateReport(msgspec.Struct, frozen=True):
    """Answer of every gate verb."""

    state: GateState
    epoch: int
    """Number of state changes."""
    held: int
    """Requests that wait at the gate."""
    sessions: int
    turns_in_flight: int
    holds: tuple[HoldReport, ...] = ()
    turns_held: int = 0
    """Turns in flight that wait."""
    sessions_open: int = 0
    changed: bool = False
    sessions_closed: int = 0
    released: int = 0
    problems: tuple[str, ...] = ()
    """One line per silent shard (`docs/scaling.md`)."""

    @property
    def turns_generating(self) -> int:
        """Turns at an engine."""
        return self.turns_in_flight - self.turns_held


@dataclass(slots=True)
class Gate:
    epoch: int = 0
    left: tuple[Hold, ...] = ()
    """Ended holds whose engines are still paused."""
    wakers: int = 0
    """Tasks that continue engines now."""
    _holds: dict[str, Hold] = field(default_factory=dict)
    _expired: dict[str, Hold] = field(default_factory=dict)

    @property
    def state(self) -> GateState:
        kinds = {hold.kind for hold in self._holds.values()}
        if HoldKind.DRAIN in kinds:
            return GateState.DRAINING
        return GateState.PAUSED if kinds else GateState.OPEN

    @property
    def holds(self) -> tuple[Hold, ...]:
        """Oldest first."""
        return tuple(self._holds.values())

    @property
    def must_wake_engines(self) -> bool:
        """True if engines are left and no hold covers them."""
        return bool(self.left) and not any(hold.engines for hold in self.holds)

    def place(self, wanted: Hold) -> Hold:
        """Place or renew a hold; never weaken or shorten it. Raise `HoldExpired` or `EnginesHeld`."""
        self._refuse_expired(wanted.holder)
        # A holder is only a name. A caller that uses another's name joins that hold, and can only make it stronger or
        # longer.
        mine = self._holds.get(wanted.holder)
        is_drain = HoldKind.DRAIN in (wanted.kind, mine and mine.kind)
        engines = wanted.engines or (mine is not None and mine.engines)
        # One hold on the engines at a time, because interleaved updates leave weights of neither.
        if engines and not (mine and mine.engines):
            other = next((hold.holder for hold in self.holds if hold.engines), None)
            if other is not None:
                raise EnginesHeld(
                    f"the engines are paused by the hold of {other!r}: wait until it is released or runs out"
                )
            if self.wakers:
                raise EnginesHeld("the engines are being continued after a hold that left them paused; retry")
        kind = HoldKind.DRAIN if is_drain else HoldKind.PAUSE
        hold = replace(wanted, kind=kind, engines=engines)
        if mine is not None:
            hold = replace(hold, until=max(hold.until, mine.until), work=hold.work or mine.work)
        self._change({**self._holds, hold.holder: hold})
        return hold

    def renew(self, holder: str, until: float) -> Hold:
        """Extend the hold to `until`. Raise `HoldNotFound` or `HoldExpired`."""
        # Unlike `place`, this cannot close an open gate.
        mine = self._require(holder)
        hold = replace(mine, until=max(until, mine.until))
        self._change({**self._holds, holder: hold})
        return hold

    def release(self, holder: str, *, engines_continued: bool = False) -> Hold | None:
        """Remove the hold. Raise `HoldNotFound` or `HoldExpired`."""
        # Any caller may release the anonymous hold at any time.
        if holder == ANONYMOUS and holder not in self._holds:
            return None
        hold = self._require(holder)
        self._end([hold], left=[hold] if hold.engines and not engines_continued else [])
        return hold

    def expire(self, now: float) -> tuple[Hold, ...]:
        ended = [hold for hold in self.holds if hold.until <= now]
        self._end(ended, left=[hold for hold in ended if hold.engines])
        for hold in ended:
            # Its holder gets `HoldExpired` on return, because the gate was open meanwhile.
            if hold.holder != ANONYMOUS:
                self._expired[hold.holder] = hold
        while len(self._expired) > _REMEMBERED:
            del self._expired[next(iter(self._expired))]
        return tuple(ended)

    def restore(self, holds: Iterable[Hold]) -> None:
        """Restore an earlier server's holds."""
        self._change({hold.holder: hold for hold in holds})

    def mirror(self, holds: Iterable[Hold], epoch: int) -> None:
        """Copy the deciding gate."""
        self._holds = {hold.holder: hold for hold in holds}
        self.epoch = epoch

    def forget_left(self) -> tuple[Hold, ...]:
        """Clear `left` once the engines work."""
        left, self.left = self.left, ()
        return left

    def answer(self, work: Work, *, is_open: bool = True) -> GateAnswer:
        # A session that is not open answers for itself, in any state of the gate.
        return GATE_TABLE[self.state, work] if is_open else GateAnswer.SERVE

    def _require(self, holder: str) -> Hold:
        self._refuse_expired(holder)
        if holder not in self._holds:
            raise HoldNotFound(holder)
        return self._holds[holder]

    def _refuse_expired(self, holder: str) -> None:
        hold = self._expired.get(holder)
        if hold is None:
            return
        # A late holder may have paused the engines after the server continued them.
        if hold.engines and hold not in self.left:
            self.left += (hold,)
        raise HoldExpired(holder)

    def _end(self, ended: Iterable[Hold], *, left: Iterable[Hold]) -> None:
        gone = {hold.holder for hold in ended}
        self.left += tuple(left)
        self._change({holder: hold for holder, hold in self._holds.items() if holder not in gone})

    def _change(self, holds: dict[str, Hold]) -> None:
        before = self.state
        self._holds = holds
        # A waiter has to notice a change even if the gate is back in the state it knew.
        self.epoch += self.state is not before
