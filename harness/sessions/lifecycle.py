"""Tables of session phases and turn ends. Only this module decides whether a command is legal.

An admitted turn may always be committed, because generated tokens are recorded (I4).
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
    OPEN = "open"
    CLOSING = "closing"
    """Drained."""
    ENDED = "ended"
    """The agent ended; interrupted turns are not finished."""
    CLOSED = "closed"
    """A store keeps its record."""


class CloseReason(StrEnum):
    DELETED = "deleted"
    DRAINED = "drained"
    """The server drained during its creation."""
    IDLE = "idle"
    TAKEN_OVER = "taken_over"
    DAMAGED = "damaged"


class RolloutEnd(NamedTuple):
    """End of a rollout, reported on deletion; the server only stores it."""

    outcome: str
    reason: str = ""
    reward: float | None = None


class Command(StrEnum):
    """Demand on a session."""

    ADMIT = "admit"
    COMMIT = "commit"
    DRAIN = "drain"
    END = "end"
    """Turns in flight end too."""
    CLOSE = "close"


TRANSITIONS: Mapping[tuple[Phase, Command], Phase] = {
    (Phase.OPEN, Command.ADMIT): Phase.OPEN,
    (Phase.OPEN, Command.COMMIT): Phase.OPEN,
    (Phase.OPEN, Command.DRAIN): Phase.CLOSING,
    (Phase.OPEN, Command.END): Phase.ENDED,
    (Phase.OPEN, Command.CLOSE): Phase.CLOSED,
    (Phase.CLOSING, Command.COMMIT): Phase.CLOSING,
    (Phase.CLOSING, Command.DRAIN): Phase.CLOSING,
    # A drained session stays drained: its interrupted turns are ABORTED.
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
    # The first row that matches the error's class counts.
    (ClientLeft, TurnEnd.CLIENT_LEFT),
    (ServerStopping, TurnEnd.SERVER_STOPPED),
    (GateClosed, TurnEnd.GATE_TIMEOUT),
    (SessionClosing, TurnEnd.SESSION_ENDED),
    (LimitReached, TurnEnd.STALE),
    (EngineError, TurnEnd.ENGINE_FAILED),
    (HarnessError, TurnEnd.SERVER_FAILED),
)


def advance(phase: Phase, command: Command) -> Phase:
    """Return the phase after `command`. Raise `IllegalTransition`."""
    try:
        return TRANSITIONS[phase, command]
    except KeyError:
        raise IllegalTransition(f"a session that is {phase} cannot {command}") from None


def end_of_error(error: HarnessError) -> TurnEnd:
    return next(end for kind, end in END_OF_ERROR if isinstance(error, kind))


def end_of_output(finish: FinishReason | None, *, has_calls: bool, is_drained: bool, is_stale: bool) -> TurnEnd:
    """Return the end of a turn; `finish` is None if it never reached the engine."""
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
