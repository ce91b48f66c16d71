"""`[[faults]]` of a `scenario.toml`. One on a session happens once per session, one on everything once."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from harness.suite.scenarios.validation import Strict

Action = Literal[
    "abort_engine",
    "drain",
    "pause",
    "kill_agent",
    "stop_agent",
    "kill_engine",
    "engine_500",
    "engine_hang",
    "cut_connection",
    "slow_network",
    "kill_server",
    "duplicate_request",
    "malformed_reply",
    "end_rollout",
]

ON_EVERYTHING: frozenset[Action] = frozenset({"drain", "pause", "kill_engine", "kill_server", "end_rollout"})
"""Actions that affect all sessions."""
ON_THE_NETWORK: frozenset[Action] = frozenset(
    {"engine_500", "engine_hang", "cut_connection", "slow_network", "malformed_reply"}
)
"""Actions on one engine request."""

SIGNALS: frozenset[Action] = frozenset({"kill_agent", "stop_agent"})
"""Actions on an agent's processes."""

_NEEDS_SECONDS: frozenset[Action] = frozenset({"pause", "slow_network"})
_TAKES_SECONDS: frozenset[Action] = _NEEDS_SECONDS | {
    "drain",
    "stop_agent",
    "kill_engine",
    "engine_hang",
    "kill_server",
    "end_rollout",
}
_TRIGGERS = ("at_turn", "at_second", "probability")


class Fault(Strict):
    action: Action
    at_turn: int | None = Field(default=None, ge=1)
    """A session's n-th model call, from 1."""
    at_token: int | None = Field(default=None, ge=1)
    """With `at_turn`: that many sampled tokens."""
    at_second: float | None = Field(default=None, ge=0)
    """Seconds since the scenario began."""
    probability: float | None = Field(default=None, gt=0, le=1)
    """Chance per turn, drawn from the session's seed."""
    sessions: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    """Positions of sessions to watch and affect; default: all."""
    seconds: float | None = Field(default=None, gt=0)
    """Duration; default by action (docs/scenarios.md)."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        given = [name for name in _TRIGGERS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of {', '.join(_TRIGGERS)} and not {' and '.join(given) or 'none of them'}")
        if self.at_token is not None and self.at_turn is None:
            raise ValueError("at_turn with at_token")
        if self.action in _NEEDS_SECONDS and self.seconds is None:
            raise ValueError(f"seconds with {self.action}")
        if self.action not in _TAKES_SECONDS and self.seconds is not None:
            raise ValueError(f"no seconds with {self.action}, which takes no time")
        return self

    @property
    def is_on_everything(self) -> bool:
        return self.action in ON_EVERYTHING

    @property
    def trigger(self) -> str:
        if self.at_second is not None:
            return f"at second {self.at_second:g}"
        if self.probability is not None:
            return f"with probability {self.probability:g}"
        return f"at turn {self.at_turn}" + (f", token {self.at_token}" if self.at_token else "")

    def names(self, session: int) -> bool:
        """Return True if the fault covers `session`."""
        return self.sessions is None or session in self.sessions
