"""The switch in front of all sessions of a server: open, paused or draining.

`GATE_TABLE` says what happens to new work in each state. The gate decides; holding a request for a while and waking
it up is the server's business. Every change of state counts as a new epoch, so a waiter can tell that something
happened even when the gate is back in the state it knew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class GateState(StrEnum):
    """Where the switch stands."""

    OPEN = "open"
    PAUSED = "paused"
    """New work waits, for a bounded time."""
    DRAINING = "draining"
    """No new sessions; the ones that were open accept no further turn."""


class Work(StrEnum):
    """What arrives at the gate."""

    CREATE = "create"
    TURN = "turn"
    CONTINUATION = "continuation"
    """The next engine request of a turn in flight."""


class Verdict(StrEnum):
    """What the gate says to work that arrives."""

    SERVE = "serve"
    HOLD = "hold"
    """Wait until the gate changes; 503 with Retry-After when that takes too long."""
    REFUSE = "refuse"
    """503 with Retry-After at once."""


GATE_TABLE: Mapping[tuple[GateState, Work], Verdict] = {
    (GateState.OPEN, Work.CREATE): Verdict.SERVE,
    (GateState.OPEN, Work.TURN): Verdict.SERVE,
    (GateState.OPEN, Work.CONTINUATION): Verdict.SERVE,
    (GateState.PAUSED, Work.CREATE): Verdict.HOLD,
    (GateState.PAUSED, Work.TURN): Verdict.HOLD,
    (GateState.PAUSED, Work.CONTINUATION): Verdict.HOLD,
    (GateState.DRAINING, Work.CREATE): Verdict.REFUSE,
    # The session decides: drained ones answer 404 for good.
    (GateState.DRAINING, Work.TURN): Verdict.SERVE,
    (GateState.DRAINING, Work.CONTINUATION): Verdict.SERVE,
}


@dataclass(slots=True)
class Gate:
    """The state of the switch and how often it changed."""

    state: GateState = GateState.OPEN
    epoch: int = 0

    def turn_to(self, state: GateState) -> bool:
        """Put the switch to `state`; False when it stood there already."""
        if state is self.state:
            return False
        self.state = state
        self.epoch += 1
        return True

    def verdict(self, work: Work) -> Verdict:
        """What happens to `work` that arrives now."""
        return GATE_TABLE[self.state, work]
