"""Rollouts: one agent, run once, against one session, and its judgement. A bad one is data, not a crash."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.errors import Cause
from harness.notebook import card, table, token_bar
from harness.types import Json, Sample, token_kinds


class OutcomeKind(StrEnum):
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
    kind: OutcomeKind
    cause: Cause | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Rollout:
    session_id: str | None
    outcome: Outcome
    samples: tuple[Sample, ...]
    session: Json
    """`GET /sessions/{id}?ids=none` after the agent ended, else an empty record."""
    agent_result: Json | None
    seconds: float

    def _repr_html_(self) -> str:
        turns = self.session["turns"]
        facts = {"session": self.session_id, "why": self.outcome.detail or None, "turns": len(turns)}
        said = [message for turn in turns for message in (*turn.get("messages_delta", ()), turn.get("reply", {}))]
        return card(
            f"Rollout: {self.outcome.kind}",
            facts | {"samples": len(self.samples), "seconds": self.seconds, "result": self.agent_result},
            token_bar(kind for sample in self.samples for kind in token_kinds(sample)),
            table(("role", "content", "tool calls"), [_as_row(message) for message in said]),
        )


def _as_row(message: Json) -> tuple[object, object, str]:
    calls = [call.get("function") or call for call in message.get("tool_calls") or ()]
    named = "\n".join(f"{call.get('name')}({call.get('arguments')})" for call in calls)
    return message.get("role", ""), message.get("content") or "", named


def stated_number(value: object) -> float | None:
    """Return a finite number that an agent or a check states, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def describe_judgement(figures: Mapping[str, float], reason: str) -> Json:
    """Return the `figures` and the `reason`, without those that are empty."""
    given = {"figures": dict(figures), "reason": reason}
    return {name: value for name, value in given.items() if value}


def stamp_judgement(samples: Iterable[Sample], judgement: Json) -> tuple[Sample, ...]:
    """Set `metadata["score"]` on all samples of a rollout, unless `judgement` is empty."""
    if not judgement:
        return tuple(samples)
    return tuple(replace(each, metadata={**each.metadata, "score": judgement}) for each in samples)
