"""The life of a session, and how a turn came to its end: the tables everything else obeys.

No code outside this module decides whether a command is legal. A turn that was admitted may always be committed,
whatever happened to the session meanwhile: tokens that were generated are recorded (I4). `harness.turn_ends` says what
an end makes of a turn.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, assert_never

from harness.errors import (
    ClientLeft,
    EngineError,
    GateClosed,
    HarnessError,
    IllegalTransition,
    LimitReached,
    ServerStopping,
    SessionClosing,
)
from harness.turn_ends import TurnEnd
from harness.types import FinishReason


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


class RolloutEnd(NamedTuple):
    """The end of a rollout, as the owner of its session tells it with the deletion; the server only keeps it."""

    outcome: str
    reason: str = ""
    reward: float | None = None


class Command(StrEnum):
    """A demand on a session."""

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

END_OF_ERROR: tuple[tuple[type[HarnessError], TurnEnd], ...] = (
    # The first row whose class the error is of counts.
    (ClientLeft, TurnEnd.CLIENT_LEFT),
    (ServerStopping, TurnEnd.SERVER_STOPPED),
    (GateClosed, TurnEnd.GATE_TIMEOUT),
    (SessionClosing, TurnEnd.SESSION_ENDED),
    (LimitReached, TurnEnd.STALE),
    (EngineError, TurnEnd.ENGINE_FAILED),
    (HarnessError, TurnEnd.SERVER_FAILED),
)
"""How a turn ended that broke off with an error."""


def advance(phase: Phase, command: Command) -> Phase:
    """The phase after `command`. Raises `IllegalTransition` when the table has no entry."""
    try:
        return TRANSITIONS[phase, command]
    except KeyError:
        raise IllegalTransition(f"a session that is {phase} cannot {command}") from None


def end_of_error(error: HarnessError) -> TurnEnd:
    """How a turn ended that broke off with `error`."""
    return next(end for kind, end in END_OF_ERROR if isinstance(error, kind))


def end_of_output(finish: FinishReason | None, *, has_calls: bool, is_drained: bool, is_stale: bool) -> TurnEnd:
    """How a turn ended whose output ended with `finish` (None: it never reached the engine), and cannot go on."""
    match finish:
        case FinishReason.STOP:
            return TurnEnd.TOOL_CALLS if has_calls else TurnEnd.MODEL
        case FinishReason.LENGTH:
            return TurnEnd.LENGTH
        case FinishReason.REPEAT:
            return TurnEnd.REPEAT
        case FinishReason.ABORT | None if is_drained:
            return TurnEnd.DRAINED
        case FinishReason.ABORT | None:
            return TurnEnd.STALE if is_stale else TurnEnd.ENGINE_ABORTED
        case _:
            assert_never(finish)
