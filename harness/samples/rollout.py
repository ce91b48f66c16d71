"""Rollouts: one agent, run once, against one session. A bad one is data, not a crash."""

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import Cause
from harness.types import Json, Sample


class OutcomeKind(StrEnum):
    """End of a rollout."""

    FINISHED = "finished"
    """Exit code 0 or a return value, after a model call."""
    LIMITED = "limited"
    """Session refused to continue: turn or token limit, branch ended."""
    DRAINED = "drained"
    """Aborted, or the gate stayed shut before the start."""
    NO_MODEL_CALL = "no_model_call"
    CRASHED = "crashed"
    """Another exit code, a signal, or an exception."""
    GARBAGE = "garbage"
    """No JSON object as result."""
    TIMED_OUT = "timed_out"
    NOT_STARTED = "not_started"
    """Agent could not start, or server refused its session."""
    ENGINE_FAILED = "engine_failed"
    """Agent failed after model calls that the engine failed to answer."""
    SANDBOX_FAILED = "sandbox_failed"
    """Sandbox could not be made, or its limits or a full disk ended the agent."""
    HARNESS_FAILED = "harness_failed"
    """Session server or store failed."""


ENDED_WELL = frozenset({OutcomeKind.FINISHED, OutcomeKind.LIMITED})
"""Outcomes whose samples keep their status."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a rollout, with its cause."""

    kind: OutcomeKind
    cause: Cause | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished rollout."""

    session_id: str | None
    outcome: Outcome
    samples: tuple[Sample, ...]
    session: Json
    """`GET /sessions/{id}?ids=none` after the agent ended, else an empty record."""
    agent_result: Json | None
    seconds: float
