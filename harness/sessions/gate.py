"""The gate in front of all sessions of a server, and the holds that shut it.

Nobody owns the gate. All who need it shut put a *hold* on it, and the gate is as shut as the strongest hold: draining
over paused over open. A hold ends when its holder releases it, or when its time is over and nobody renewed it: a
controller that dies shuts nobody out for longer than that. So an abort that ends cannot open the gate under a weight
update, and a pause never softens a drain. A name is all that a holder shows: who places a hold under the name of
another joins it, and can make it stronger and longer, neither weaker nor shorter.

A hold may cover the engines: its holder pauses them while it works. One hold at a time does, because two updates that
interleave leave weights of neither. When such a hold ends and its holder did not say that the engines go on, they are
*left*: paused, and nobody is there to continue them but the server. The same holds when the holder of one that ran out
comes back: it may have paused them since.

`GATE_TABLE` says what happens to new work. The gate decides; holding a request for a while, waking it up, time and
continuing engines are the server's business. Every change of state counts as a new epoch, so a waiter can tell that
something happened even when the gate is back in the state it knew.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from harness.errors import EnginesHeld, HoldExpired, HoldNotFound

ANONYMOUS = "anonymous"
"""The holder of a verb that names none."""

_REMEMBERED = 1000  # holders whose hold has expired; each is a name


class GateState(StrEnum):
    """Where the gate stands."""

    OPEN = "open"
    PAUSED = "paused"
    """New work waits, for a bounded time."""
    DRAINING = "draining"
    """No new sessions; the ones that were open accept no further turn."""


class HoldKind(StrEnum):
    """The effect of a hold on the gate."""

    PAUSE = "pause"
    DRAIN = "drain"


class Work(StrEnum):
    """The kinds of work that arrive at the gate."""

    CREATE = "create"
    TURN = "turn"
    CONTINUATION = "continuation"
    """The next engine request of a turn in flight."""


class GateAnswer(StrEnum):
    """The answers of the gate to work that arrives."""

    SERVE = "serve"
    HOLD = "hold"
    """Wait until the gate changes; 503 with Retry-After when that takes too long."""
    REFUSE = "refuse"
    """503 with Retry-After at once."""


GATE_TABLE: Mapping[tuple[GateState, Work], GateAnswer] = {
    (GateState.OPEN, Work.CREATE): GateAnswer.SERVE,
    (GateState.OPEN, Work.TURN): GateAnswer.SERVE,
    (GateState.OPEN, Work.CONTINUATION): GateAnswer.SERVE,
    (GateState.PAUSED, Work.CREATE): GateAnswer.HOLD,
    (GateState.PAUSED, Work.TURN): GateAnswer.HOLD,
    (GateState.PAUSED, Work.CONTINUATION): GateAnswer.HOLD,
    (GateState.DRAINING, Work.CREATE): GateAnswer.REFUSE,
    # The session decides: drained ones answer 404 for good.
    (GateState.DRAINING, Work.TURN): GateAnswer.SERVE,
    (GateState.DRAINING, Work.CONTINUATION): GateAnswer.SERVE,
}


@dataclass(frozen=True, slots=True)
class Hold:
    """The demand of one holder on the gate, and until when."""

    holder: str
    kind: HoldKind
    until: float
    """Unix time in seconds; the same verb makes it later, never earlier."""
    engines: bool = False
    """Its holder pauses the engines of this server."""
    work: str = ""
    """The work that this server does in the name of the holder: one that is started again goes on with it, and nobody
    else continues the engines. Empty when the holder works by itself."""


class HoldReport(msgspec.Struct, frozen=True):
    """A hold as it is told to whoever asks."""

    holder: str
    kind: HoldKind
    engines: bool = False
    """Its holder pauses the engines of the server."""
    ends_in_s: float = 0.0
    """Unless it is renewed."""


class GateReport(msgspec.Struct, frozen=True):
    """The answer of every verb of the gate; the last three say what this verb touched."""

    state: GateState
    epoch: int
    """How often the gate has changed."""
    held: int
    """Requests that wait at it."""
    sessions: int
    """Sessions that the server holds."""
    turns_in_flight: int
    holds: tuple[HoldReport, ...] = ()
    turns_held: int = 0
    """Those of the turns in flight that wait at the gate to be continued."""
    sessions_open: int = 0
    """Those of its sessions that still accept turns."""
    changed: bool = False
    sessions_closed: int = 0
    """Sessions that this drain ended."""
    released: int = 0
    """Requests that this resume let go on."""
    problems: tuple[str, ...] = ()
    """A line for each shard of the server that did not answer; see `docs/scaling.md`."""

    @property
    def turns_generating(self) -> int:
        """Turns in flight that an engine is busy with."""
        return self.turns_in_flight - self.turns_held


@dataclass(slots=True)
class Gate:
    """The holds on the gate, and how often its state changed."""

    epoch: int = 0
    left: tuple[Hold, ...] = ()
    """Holds that ended without a word that the engines they had paused go on; nobody has continued them since."""
    wakers: int = 0
    """How many continue the engines now: a hold that would pause them has to wait."""
    _holds: dict[str, Hold] = field(default_factory=dict)
    _expired: dict[str, Hold] = field(default_factory=dict)

    @property
    def state(self) -> GateState:
        """The strongest hold."""
        kinds = {hold.kind for hold in self._holds.values()}
        if HoldKind.DRAIN in kinds:
            return GateState.DRAINING
        return GateState.PAUSED if kinds else GateState.OPEN

    @property
    def holds(self) -> tuple[Hold, ...]:
        """All of them, in the order in which they were placed."""
        return tuple(self._holds.values())

    @property
    def has_pause(self) -> bool:
        """Somebody pauses, under a drain of somebody else too: engines may be silent for what he does."""
        return any(hold.kind is HoldKind.PAUSE for hold in self.holds)

    @property
    def must_wake_engines(self) -> bool:
        """Engines are left paused, and no hold wants them so."""
        return bool(self.left) and not any(hold.engines for hold in self.holds)

    def place(self, wanted: Hold) -> Hold:
        """Put a hold on the gate, or renew the one that its holder has.

        A drain stays one whatever is asked later, its end is never brought forward, and its work is kept.

        Raises `HoldExpired` when the holder had one that ran out: what it kept shut has been open. Raises `EnginesHeld`
        when the engines are somebody else's. Nothing is changed then.
        """
        self._refuse_expired(wanted.holder)
        mine = self._holds.get(wanted.holder)
        is_drain = HoldKind.DRAIN in (wanted.kind, mine and mine.kind)
        engines = wanted.engines or (mine is not None and mine.engines)
        if engines and not (mine and mine.engines):
            other = next((hold.holder for hold in self.holds if hold.engines), None)
            if other is not None:
                raise EnginesHeld(
                    f"the engines are paused by the hold of {other!r}: wait until it is released or runs out"
                )
            if self.wakers:
                raise EnginesHeld("the engines are being continued after a hold that left them paused; ask again")
        kind = HoldKind.DRAIN if is_drain else HoldKind.PAUSE
        hold = replace(wanted, kind=kind, engines=engines)
        if mine is not None:
            hold = replace(hold, until=max(hold.until, mine.until), work=hold.work or mine.work)
        self._change({**self._holds, hold.holder: hold})
        return hold

    def renew(self, holder: str, until: float) -> Hold:
        """Have `holder`'s hold last until then, unless it lasts longer; unlike `place` it shuts no gate that is open.

        Raises `HoldNotFound` when there is none, `HoldExpired` when it has run out.
        """
        mine = self._require(holder)
        hold = replace(mine, until=max(until, mine.until))
        self._change({**self._holds, holder: hold})
        return hold

    def release(self, holder: str, *, engines_continued: bool = False) -> Hold | None:
        """Take `holder`'s hold off the gate; `engines_continued` says that the engines it paused work again.

        Raises `HoldNotFound` when there is none, `HoldExpired` when it had run out before; the anonymous one may be
        released by anybody at any time, and is None when there is none.
        """
        if holder == ANONYMOUS and holder not in self._holds:
            return None
        hold = self._require(holder)
        self._end([hold], left=[hold] if hold.engines and not engines_continued else [])
        return hold

    def expire(self, now: float) -> tuple[Hold, ...]:
        """Take off what has run out by `now`; its holders are told when they come back, the anonymous one excepted."""
        ended = [hold for hold in self.holds if hold.until <= now]
        self._end(ended, left=[hold for hold in ended if hold.engines])
        for hold in ended:
            if hold.holder != ANONYMOUS:
                self._expired[hold.holder] = hold
        while len(self._expired) > _REMEMBERED:
            del self._expired[next(iter(self._expired))]
        return tuple(ended)

    def restore(self, holds: Iterable[Hold]) -> None:
        """Have the holds that an earlier server kept."""
        self._change({hold.holder: hold for hold in holds})

    def mirror(self, holds: Iterable[Hold], epoch: int) -> None:
        """Stand as the gate does that decides for this one."""
        self._holds = {hold.holder: hold for hold in holds}
        self.epoch = epoch

    def forget_left(self) -> tuple[Hold, ...]:
        """The engines work again: the holds that had left them paused."""
        left, self.left = self.left, ()
        return left

    def answer(self, work: Work, *, is_open: bool = True) -> GateAnswer:
        """The answer to `work` that arrives now; a session that is not open answers for itself, whatever the gate."""
        return GATE_TABLE[self.state, work] if is_open else GateAnswer.SERVE

    def _require(self, holder: str) -> Hold:
        self._refuse_expired(holder)
        if holder not in self._holds:
            raise HoldNotFound(holder)
        return self._holds[holder]

    def _refuse_expired(self, holder: str) -> None:
        """Raises `HoldExpired`; who comes back late may have paused the engines after they were continued."""
        hold = self._expired.get(holder)
        if hold is None:
            return
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
        self.epoch += self.state is not before
