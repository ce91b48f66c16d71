"""The result of a rollout: one agent, run once, against one session.

However the agent ends, the rollout ends with a typed `Outcome`: a bad rollout is data, not a crash.
"""

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import Cause
from harness.types import Json, Sample


class OutcomeKind(StrEnum):
    """How a rollout ended."""

    FINISHED = "finished"
    """The agent ended by itself, with exit code 0 or a return value, after at least one model call."""
    LIMITED = "limited"
    """The session refused to go on (turn or token limit, branch ended) and the agent stopped."""
    DRAINED = "drained"
    """The rollout was aborted: its session was drained or closed under the agent, the agent was stopped, or the gate
    stayed shut before it began."""
    NO_MODEL_CALL = "no_model_call"
    """The agent ended without a single model call."""
    CRASHED = "crashed"
    """The agent exited with another code, was killed by a signal, or raised."""
    GARBAGE = "garbage"
    """The agent's result is not a JSON object."""
    TIMED_OUT = "timed_out"
    """The agent was stopped at its deadline."""
    NOT_STARTED = "not_started"
    """The agent could not be started, or the session it asked for is not one the server gives out."""
    ENGINE_FAILED = "engine_failed"
    """The agent failed after model calls that the engine failed to answer."""
    HARNESS_FAILED = "harness_failed"
    """The session server or the store failed."""


ENDED_WELL = frozenset({OutcomeKind.FINISHED, OutcomeKind.LIMITED})
"""Outcomes of rollouts that nothing cut short: their samples keep their own status."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a rollout ended, who is to blame, and a sentence for the reader."""

    kind: OutcomeKind
    cause: Cause | None
    """None when nothing went wrong."""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished rollout."""

    session_id: str | None
    """None when no session could be created."""
    outcome: Outcome
    samples: tuple[Sample, ...]
    session: Json
    """`GET /sessions/{id}?ids=none` after the agent ended: the conversation, statuses and ledger, without token columns
    (the samples have the tokens); an empty record when there was no session."""
    agent_result: Json | None
    seconds: float
