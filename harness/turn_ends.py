"""Why a turn ended, and what follows from it: the one table.

`TurnEnd` says what ended a turn, `TURN_ENDS` what that makes of it: its status, whether its partial output waits to be
continued, and the words of the answer. Everything else that depends on the reason (samples, the ledger, retries,
takeovers, metrics) asks this table. `sessions.lifecycle` decides which end it was, from what the server has seen.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class TurnStatus(StrEnum):
    """The worth of a turn to a trainer."""

    COMPLETED = "completed"
    """Ended by the model (stop, tool calls)."""
    TRUNCATED = "truncated"
    """Cut by a length limit or by the repeat guard."""
    ABORTED = "aborted"
    """Cut by an abort; never served as COMPLETED (I2)."""
    FAILED = "failed"
    """No usable output."""


class TurnEnd(StrEnum):
    """Why a turn ended. `Turn.notes["error"]` has the error's own words where one was the reason."""

    MODEL = "model"
    """The model ended its output: an end-of-turn id, or a stop that was asked for."""
    TOOL_CALLS = "tool_calls"
    """The model ended its output, and calls tools in it."""
    LENGTH = "length"
    """The budget of output tokens, or the model's context, was used up."""
    REPEAT = "repeat"
    """The repeat guard ended an output that repeated itself."""
    DRAINED = "drained"
    """Its session was drained: the turn keeps what had arrived and is a sample's last."""
    ENGINE_ABORTED = "engine_aborted"
    """The engine ended its requests, more often than `max_unsolicited_aborts` allows, and nobody had asked it to."""
    STALE = "stale"
    """Its tokens had become older than `limits.staleness` allows: weights went on, and neither an engine, a client nor
    a budget of tokens had anything to do with it."""
    CLIENT_LEFT = "client_left"
    """The client closed its connection before the answer. So did that of every turn which its session's successor takes
    up: the agent that had asked is gone."""
    SESSION_ENDED = "session_ended"
    """Its session was ended or deleted by its owner: nobody waits for the answer, and it is no part of what the agent
    had done. A drain comes in the midst of that, and keeps what had arrived (DRAINED)."""
    GATE_TIMEOUT = "gate_timeout"
    """The gate stayed shut for longer than a turn may be held."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed, and repeating the request did not help or could not."""
    SERVER_STOPPED = "server_stopped"
    """The session server stopped in good order before the turn was complete; the next one goes on with it."""
    SERVER_FAILED = "server_failed"
    """A bug of ours, or a cancellation from outside, ended the work on it."""
    STORE_FAILED = "store_failed"
    """The store did not keep the turn: nobody was answered, and whatever had been sampled is dropped."""


class EndRule(NamedTuple):
    """The consequences of an end."""

    status: TurnStatus
    """Of a turn that has sampled something."""
    unsampled: TurnStatus
    """Of a turn that was ended before its first token."""
    waits: bool
    """The partial output is in no sample: it waits until the same request comes again, here or in a session that takes
    over, and goes on as the same turn."""
    finish_reason: str | None
    """Its name in an answer with the turn; None where no answer can have it, only an error."""


_COMPLETED, _TRUNCATED = TurnStatus.COMPLETED, TurnStatus.TRUNCATED
_ABORTED, _FAILED = TurnStatus.ABORTED, TurnStatus.FAILED

TURN_ENDS: Mapping[TurnEnd, EndRule] = {
    # A turn that is FAILED begins again with the same request; what it had sampled is dropped.
    TurnEnd.MODEL: EndRule(_COMPLETED, _COMPLETED, waits=False, finish_reason="stop"),
    TurnEnd.TOOL_CALLS: EndRule(_COMPLETED, _COMPLETED, waits=False, finish_reason="tool_calls"),
    TurnEnd.LENGTH: EndRule(_TRUNCATED, _TRUNCATED, waits=False, finish_reason="length"),
    TurnEnd.REPEAT: EndRule(_TRUNCATED, _TRUNCATED, waits=False, finish_reason="length"),
    TurnEnd.DRAINED: EndRule(_ABORTED, _ABORTED, waits=False, finish_reason="abort"),
    TurnEnd.ENGINE_ABORTED: EndRule(_ABORTED, _ABORTED, waits=False, finish_reason="abort"),
    TurnEnd.STALE: EndRule(_ABORTED, _FAILED, waits=False, finish_reason="abort"),
    TurnEnd.CLIENT_LEFT: EndRule(_ABORTED, _ABORTED, waits=True, finish_reason=None),
    TurnEnd.SESSION_ENDED: EndRule(_ABORTED, _FAILED, waits=True, finish_reason=None),
    TurnEnd.GATE_TIMEOUT: EndRule(_ABORTED, _ABORTED, waits=True, finish_reason=None),
    TurnEnd.ENGINE_FAILED: EndRule(_ABORTED, _FAILED, waits=True, finish_reason=None),
    TurnEnd.SERVER_STOPPED: EndRule(_ABORTED, _ABORTED, waits=True, finish_reason=None),
    TurnEnd.SERVER_FAILED: EndRule(_ABORTED, _FAILED, waits=True, finish_reason=None),
    TurnEnd.STORE_FAILED: EndRule(_FAILED, _FAILED, waits=False, finish_reason=None),
}


def status_of(end: TurnEnd, sampled: int) -> TurnStatus:
    """The worth of a turn that ended so with `sampled` output tokens."""
    rule = TURN_ENDS[end]
    return rule.status if sampled else rule.unsampled
