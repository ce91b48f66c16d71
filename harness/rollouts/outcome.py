"""From what was observed of a rollout to its outcome: one table, no I/O.

The observations are how the agent ended, what the session counted, and what became of the agent's result. The rules
are tried from the top and the first that holds decides, so the order is the policy: what ended the agent from
outside (deadline, signal) comes before what the session told it, and that before the agent's own exit code.
An engine failure that the client library retried away is no failure: it only counts when the agent did not end well.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from signal import Signals
from typing import NamedTuple

from harness.errors import (
    BranchEnded,
    Cause,
    EngineError,
    GateClosed,
    HarnessError,
    LedgerImbalance,
    LimitReached,
    SessionClosing,
    SessionDamaged,
    StoreError,
    TurnAborted,
)
from harness.rollouts.agents.result import AgentResult, ResultState
from harness.samples.rollout import Outcome, OutcomeKind


class Ending(StrEnum):
    """How the agent itself ended."""

    NOT_PREPARED = "not_prepared"
    """Its working directory could not be filled."""
    NOT_STARTED = "not_started"
    """The program does not exist or cannot be executed."""
    EXITED = "exited"
    """The program ended by itself with an exit code."""
    KILLED = "killed"
    """The program died of a signal that the manager did not send."""
    RETURNED = "returned"
    """The function returned."""
    RAISED = "raised"
    """The function raised."""
    TIMED_OUT = "timed_out"
    """It was stopped at its deadline."""
    STOPPED = "stopped"
    """It still ran when the agents of an aborted rollout were ended."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How the agent ended, with the number or the words that belong to it."""

    ending: Ending
    code: int = 0
    """Exit code of EXITED, signal number of KILLED."""
    detail: str = ""

    @property
    def words(self) -> str:
        """For a reader."""
        match self.ending:
            case Ending.EXITED:
                words = f"exit code {self.code}"
            case Ending.KILLED:
                names = {signal.value: signal.name for signal in Signals}
                words = f"killed by {names.get(self.code, f'signal {self.code}')}"
            case _:
                words = self.ending.value.replace("_", " ")
        return f"{words} ({self.detail})" if self.detail else words


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """Everything the classification looks at."""

    end: AgentEnd
    result: AgentResult = field(default_factory=AgentResult)
    answered: int = 0
    """Turns that have an output."""
    failed: int = 0
    """Turns that the engine did not finish."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Requests that the session answered with an error, by its code."""
    is_drained: bool = False
    """The session was drained before the agent had ended."""
    session_lost: str | None = None
    """Why the session could not be read back; None when it could."""

    @property
    def has_ended_well(self) -> bool:
        """The agent says that all went well."""
        return self.end.ending is Ending.RETURNED or (self.end.ending is Ending.EXITED and self.end.code == 0)

    def was_refused(self, codes: Collection[str]) -> bool:
        """Whether the session answered a request with one of `codes`."""
        return any(self.refusals.get(code) for code in codes)


def error_codes(*roots: type[HarnessError]) -> frozenset[str]:
    """The codes of `roots` and of every class below them."""
    below = (error_codes(*root.__subclasses__()) for root in roots)
    return frozenset(root.code for root in roots).union(*below)


DRAIN_CODES = error_codes(SessionClosing)
LIMIT_CODES = error_codes(BranchEnded, LimitReached)
ABORT_CODES = error_codes(TurnAborted)
ENGINE_CODES = error_codes(EngineError)
HARNESS_CODES = error_codes(StoreError, SessionDamaged, GateClosed, LedgerImbalance) | {HarnessError.code}

_SHELL_CANNOT_RUN = (126, 127)  # POSIX: the command is not executable, or was not found


class OutcomeRule(NamedTuple):
    """When `holds`, the rollout is a `kind` and `cause` has to change something."""

    holds: Callable[[RolloutFacts], bool]
    kind: OutcomeKind
    cause: Cause | None


RULES = (
    OutcomeRule(lambda facts: facts.session_lost is not None, OutcomeKind.HARNESS_FAILED, Cause.HARNESS),
    OutcomeRule(lambda facts: facts.end.ending is Ending.NOT_PREPARED, OutcomeKind.NOT_STARTED, Cause.HARNESS),
    OutcomeRule(lambda facts: facts.end.ending is Ending.NOT_STARTED, OutcomeKind.NOT_STARTED, Cause.AGENT),
    OutcomeRule(
        lambda facts: facts.end.ending is Ending.EXITED and facts.end.code in _SHELL_CANNOT_RUN and not facts.answered,
        OutcomeKind.NOT_STARTED,
        Cause.AGENT,
    ),
    OutcomeRule(lambda facts: facts.end.ending is Ending.TIMED_OUT, OutcomeKind.TIMED_OUT, Cause.LIMIT),
    OutcomeRule(lambda facts: facts.end.ending is Ending.STOPPED, OutcomeKind.DRAINED, Cause.LIMIT),
    OutcomeRule(lambda facts: facts.end.ending is Ending.KILLED, OutcomeKind.CRASHED, Cause.AGENT),
    OutcomeRule(
        lambda facts: facts.has_ended_well and facts.result.state is ResultState.GARBAGE,
        OutcomeKind.GARBAGE,
        Cause.AGENT,
    ),
    OutcomeRule(  # the agent was told so, or its turn was cut short and the session had been drained
        lambda facts: facts.was_refused(DRAIN_CODES) or (facts.is_drained and facts.was_refused(ABORT_CODES)),
        OutcomeKind.DRAINED,
        Cause.LIMIT,
    ),
    OutcomeRule(lambda facts: facts.was_refused(ABORT_CODES), OutcomeKind.ENGINE_FAILED, Cause.ENGINE),
    OutcomeRule(lambda facts: facts.was_refused(LIMIT_CODES), OutcomeKind.LIMITED, Cause.LIMIT),
    OutcomeRule(lambda facts: facts.has_ended_well and facts.answered > 0, OutcomeKind.FINISHED, None),
    OutcomeRule(lambda facts: facts.was_refused(HARNESS_CODES), OutcomeKind.HARNESS_FAILED, Cause.HARNESS),
    OutcomeRule(
        lambda facts: facts.failed > 0 or facts.was_refused(ENGINE_CODES), OutcomeKind.ENGINE_FAILED, Cause.ENGINE
    ),
    OutcomeRule(lambda facts: facts.has_ended_well, OutcomeKind.NO_MODEL_CALL, Cause.AGENT),
    OutcomeRule(lambda _facts: True, OutcomeKind.CRASHED, Cause.AGENT),
)


def classify(facts: RolloutFacts) -> Outcome:
    """The outcome of a rollout whose session existed."""
    rule = next(rule for rule in RULES if rule.holds(facts))
    return Outcome(rule.kind, rule.cause, describe(facts))


def classify_uncreated(code: str, status: int, message: str) -> Outcome:
    """The outcome of a rollout for which no session could be created.

    `code` and `status` are those of the server's answer; status 0 means that there was none.
    """
    detail = f"no session: {message}"
    if code == GateClosed.code:
        return Outcome(OutcomeKind.DRAINED, Cause.LIMIT, detail)
    if code in ENGINE_CODES:
        return Outcome(OutcomeKind.ENGINE_FAILED, Cause.ENGINE, detail)
    if 400 <= status < 500:
        return Outcome(OutcomeKind.NOT_STARTED, Cause.SCENARIO, detail)
    return Outcome(OutcomeKind.HARNESS_FAILED, Cause.HARNESS, detail)


def describe(facts: RolloutFacts) -> str:
    """One line for the reader: how the agent ended, after how much, and what it was refused."""
    parts = [facts.end.words, _count(facts.answered, "turn")]
    if facts.failed:
        parts.append(f"{_count(facts.failed, 'turn')} failed")
    if facts.refusals:
        refused = ", ".join(f"{code} x{count}" for code, count in sorted(facts.refusals.items()))
        parts.append(f"refused: {refused}")
    if facts.result.state is ResultState.GARBAGE:
        parts.append(f"result unusable: {facts.result.detail}")
    if facts.session_lost is not None:
        parts.append(f"session not readable: {facts.session_lost}")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
