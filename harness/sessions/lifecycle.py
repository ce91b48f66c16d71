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
    ENDED = "ended"
    """Its agent has ended, and its owner collects: every new turn is refused, and none that was cut short is sampled
    to its end."""
    CLOSED = "closed"
    """Given back by its owner; the server forgets it, a store keeps its record."""


class CloseReason(StrEnum):
    """Why a session was closed."""

    DELETED = "deleted"
    """Its owner gave it back."""
    DRAINED = "drained"
    """The server was drained while it was being created."""
    IDLE = "idle"
    """Nobody had used it for longer than the server keeps such sessions."""
    TAKEN_OVER = "taken_over"
    """Another session went on with its turns."""
    DAMAGED = "damaged"
    """It could not be read back, and was given up."""


class Command(StrEnum):
    """What can be asked of a session."""

    ADMIT = "admit"
    """Start a turn."""
    COMMIT = "commit"
    """Record what a started turn produced."""
    DRAIN = "drain"
    """Accept no further turn."""
    END = "end"
    """The agent has ended; what it left in flight ends too."""
    CLOSE = "close"
    """The owner has collected what it wanted."""


TRANSITIONS: Mapping[tuple[Phase, Command], Phase] = {
    (Phase.OPEN, Command.ADMIT): Phase.OPEN,
    (Phase.OPEN, Command.COMMIT): Phase.OPEN,
    (Phase.OPEN, Command.DRAIN): Phase.CLOSING,
    (Phase.OPEN, Command.END): Phase.ENDED,
    (Phase.OPEN, Command.CLOSE): Phase.CLOSED,
    (Phase.CLOSING, Command.COMMIT): Phase.CLOSING,
    (Phase.CLOSING, Command.DRAIN): Phase.CLOSING,
    # Drained it was, and stays: what was cut short in it is ABORTED.
    (Phase.CLOSING, Command.END): Phase.CLOSING,
    (Phase.CLOSING, Command.CLOSE): Phase.CLOSED,
    (Phase.ENDED, Command.COMMIT): Phase.ENDED,
    (Phase.ENDED, Command.DRAIN): Phase.ENDED,
    (Phase.ENDED, Command.END): Phase.ENDED,
    (Phase.ENDED, Command.CLOSE): Phase.CLOSED,
    (Phase.CLOSED, Command.COMMIT): Phase.CLOSED,
    (Phase.CLOSED, Command.DRAIN): Phase.CLOSED,
    (Phase.CLOSED, Command.END): Phase.CLOSED,
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
