"""Reasons why a turn ends, and their consequences, in one table.

`TURN_ENDS` maps each `TurnEnd` to the turn's status, whether a partial output waits to be continued, and the finish
reason of the answer. Samples, ledger, retries, takeovers and metrics read this table. `sessions.lifecycle` decides
which end applies.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class TurnStatus(StrEnum):
    """Value of a turn to the trainer."""

    COMPLETED = "completed"
    """Ended by the model (stop, tool calls)."""
    TRUNCATED = "truncated"
    """Cut by a length limit or the repeat guard."""
    ABORTED = "aborted"
    """Cut by an abort; never served as COMPLETED (I2)."""
    FAILED = "failed"
    """No usable output."""


class TurnEnd(StrEnum):
    """Reason why a turn ended. `TurnNotes.error` has the error, if any."""

    MODEL = "model"
    """The model sampled an end-of-turn id or a requested stop."""
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    """The output budget or the model's context is used up."""
    REPEAT = "repeat"
    DRAINED = "drained"
    """The session was drained. The turn keeps its partial output and is the last of its sample."""
    ENGINE_ABORTED = "engine_aborted"
    """The engine ended requests on its own, more often than `max_unsolicited_aborts` allows."""
    STALE = "stale"
    """The weights moved past `limits.staleness`."""
    CLIENT_LEFT = "client_left"
    """The client closed its connection before the answer, or its session's successor took the turn over."""
    SESSION_ENDED = "session_ended"
    """The owner ended or deleted the session, so no agent waits for the answer. A drain instead interrupts an agent at
    work and keeps the partial output (DRAINED)."""
    GATE_TIMEOUT = "gate_timeout"
    """The gate stayed closed longer than a turn may be held."""
    ENGINE_FAILED = "engine_failed"
    """The engine failed, and retries were impossible or failed too."""
    SERVER_STOPPED = "server_stopped"
    """The server shut down in order; the next one continues the turn."""
    SERVER_FAILED = "server_failed"
    """A bug in the server, or a cancellation from outside."""
    STORE_FAILED = "store_failed"
    """The store did not keep the turn: no answer, and the output is dropped."""


class EndRule(NamedTuple):
    """Consequences of an end."""

    status: TurnStatus
    """After at least one sampled token."""
    unsampled: TurnStatus
    """Without any."""
    waits: bool
    """The partial output is in no sample. The same request, here or in a successor session, continues the turn."""
    finish_reason: str | None
    """None if only an error can be answered."""


_COMPLETED, _TRUNCATED = TurnStatus.COMPLETED, TurnStatus.TRUNCATED
_ABORTED, _FAILED = TurnStatus.ABORTED, TurnStatus.FAILED

TURN_ENDS: Mapping[TurnEnd, EndRule] = {
    # A FAILED turn starts over with the same request; what it had sampled is dropped.
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
    """Return the status of a turn that ended with `end` after `sampled` output tokens."""
    rule = TURN_ENDS[end]
    return rule.status if sampled else rule.unsampled
