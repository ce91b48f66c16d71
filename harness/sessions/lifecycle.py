"""What may happen to a session and what a turn is worth: the tables everything else obeys.

No code outside this module decides whether a command is legal. A turn that was admitted may always be committed,
whatever happened to the session meanwhile: tokens that were generated are recorded (I4).
"""

from collections.abc import Mapping
from enum import StrEnum

from harness.errors import IllegalTransition
from harness.types import FinishReason, TurnStatus


class Phase(StrEnum):
    """Where a session stands."""

    OPEN = "open"
    """Accepts turns."""
    CLOSING = "closing"
    """Drained: every new turn is refused, for good."""
    CLOSED = "closed"
    """Given back by its owner; the server forgets it, a store keeps its record."""


class Command(StrEnum):
    """What can be asked of a session."""

    ADMIT = "admit"
    """Start a turn."""
    COMMIT = "commit"
    """Record what a started turn produced."""
    DRAIN = "drain"
    """Accept no further turn."""
    CLOSE = "close"
    """The owner has collected what it wanted."""


TRANSITIONS: Mapping[tuple[Phase, Command], Phase] = {
    (Phase.OPEN, Command.ADMIT): Phase.OPEN,
    (Phase.OPEN, Command.COMMIT): Phase.OPEN,
    (Phase.OPEN, Command.DRAIN): Phase.CLOSING,
    (Phase.OPEN, Command.CLOSE): Phase.CLOSED,
    (Phase.CLOSING, Command.COMMIT): Phase.CLOSING,
    (Phase.CLOSING, Command.DRAIN): Phase.CLOSING,
    (Phase.CLOSING, Command.CLOSE): Phase.CLOSED,
    (Phase.CLOSED, Command.COMMIT): Phase.CLOSED,
    (Phase.CLOSED, Command.DRAIN): Phase.CLOSED,
    (Phase.CLOSED, Command.CLOSE): Phase.CLOSED,
}

STATUS_OF_FINISH: Mapping[FinishReason, TurnStatus] = {
    FinishReason.STOP: TurnStatus.COMPLETED,
    FinishReason.LENGTH: TurnStatus.TRUNCATED,
    FinishReason.REPEAT: TurnStatus.TRUNCATED,
    FinishReason.ABORT: TurnStatus.ABORTED,
}


def advance(phase: Phase, command: Command) -> Phase:
    """The phase after `command`. Raises `IllegalTransition` when the table has no entry."""
    try:
        return TRANSITIONS[phase, command]
    except KeyError:
        raise IllegalTransition(f"a session that is {phase} cannot {command}") from None
