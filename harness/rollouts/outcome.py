"""Classification of a rollout: from observations to an outcome, in one table, without I/O."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from signal import Signals
from typing import NamedTuple, Self

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
from harness.rollouts.agents.agent_output import AgentResult
from harness.rollouts.client.session_server import Collected
from harness.samples.rollout import Outcome, OutcomeKind
from harness.sessions.lifecycle import Phase
from harness.turn_ends import TurnStatus


class Ending(StrEnum):
    """End of the agent itself."""

    NOT_PREPARED = "not_prepared"
    """The working directory could not be filled."""
    NOT_STARTED = "not_started"
    """The program does not exist or cannot be executed."""
    BOX_FAILED = "sandbox_failed"
    """Its sandbox failed, not the agent."""
    EXITED = "exited"
    KILLED = "killed"
    """A signal that the manager did not send ended the program."""
    RETURNED = "returned"
    RAISED = "raised"
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"
    """An abort ended the agent."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    ending: Ending
    code: int = 0
    """Exit code or signal number."""
    detail: str = ""
    left: Sequence[int] = ()
    """Ids of its processes that could not be ended."""
    is_boxed: bool = False
    """True if it ran in a sandbox."""

    @property
    def words(self) -> str:
        match self.ending:
            case Ending.EXITED:
                words = f"exit code {self.code}"
            case Ending.KILLED:
                names = {signal.value: signal.name for signal in Signals}
                words = f"killed by {names.get(self.code, f'signal {self.code}')}"
            case _:
                words = self.ending.value.replace("_", " ")
        words = f"{words} ({self.detail})" if self.detail else words
        left = f"; could not be ended: process {', '.join(map(str, self.left))}" if self.left else ""
        return words + left


class AgentRun(NamedTuple):
    end: AgentEnd
    result: AgentResult = AgentResult()
    trace: str = ""
    """Traceback of a function, for the log."""


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    end: AgentEnd
    result: AgentResult = field(default_factory=AgentResult)
    answered: int = 0
    """Turns that have an output."""
    failed: int = 0
    """Turns that the engine did not finish."""
    refusals: Mapping[str, int] = field(default_factory=dict)
    """Error answers of the session, by code."""
    is_drained: bool = False
    """True if the session was drained before the agent ended."""
    session_lost: str | None = None
    """Reason that the session could not be read back."""

    @classmethod
    def of(cls, end: AgentEnd, record: Collected, result: AgentResult | None = None) -> Self:
        turns = record.facts.turns
        failed = turns.get(TurnStatus.FAILED, 0)
        return cls(
            end=end,
            result=result or AgentResult(),
            answered=sum(turns.values()) - failed,
            failed=failed,
            refusals=record.facts.refusals,
            is_drained=record.facts.phase == Phase.CLOSING,
            session_lost=record.lost,
        )

    @property
    def has_ended_well(self) -> bool:
        """True if the agent reports success."""
        return self.end.ending is Ending.RETURNED or (self.end.ending is Ending.EXITED and self.end.code == 0)

    def was_refused(self, codes: Collection[str]) -> bool:
        return any(self.refusals.get(code) for code in codes)


def error_codes(*roots: type[HarnessError]) -> frozenset[str]:
    below = (error_codes(*root.__subclasses__()) for root in roots)
    return frozenset(root.code for root in roots).union(*below)


DRAIN_CODES = error_codes(SessionClosing)
LIMIT_CODES = error_codes(BranchEnded, LimitReached)
ABORT_CODES = error_codes(TurnAborted)
ENGINE_CODES = error_codes(EngineError)
HARNESS_CODES = error_codes(StoreError, SessionDamaged, GateClosed, LedgerImbalance) | {HarnessError.code}

_BOX_CANNOT_RUN = 125  # podman, docker and `bwrap.py`: they failed, not the command
_SHELL_CANNOT_RUN = (126, 127)  # POSIX: the command is not executable, or was not found


class OutcomeRule(NamedTuple):
    """Kind and cause of the outcome if `holds` is true."""

    holds: Callable[[RolloutFacts], bool]
    kind: OutcomeKind
    cause: Cause | None


# The order is the policy: an external end (deadline, signal) precedes the session's answers, which precede the agent's
# exit code. Engine failures that the client retried away do not count: they matter only if the agent did not end well.
RULES = (
    OutcomeRule(lambda facts: facts.session_lost is not None, OutcomeKind.HARNESS_FAILED, Cause.HARNESS),
    OutcomeRule(lambda facts: facts.end.ending is Ending.NOT_PREPARED, OutcomeKind.NOT_STARTED, Cause.HARNESS),
    OutcomeRule(lambda facts: facts.end.ending is Ending.BOX_FAILED, OutcomeKind.SANDBOX_FAILED, Cause.HARNESS),
    OutcomeRule(lambda facts: facts.end.ending is Ending.NOT_STARTED, OutcomeKind.NOT_STARTED, Cause.AGENT),
    OutcomeRule(
        lambda facts: facts.end.is_boxed and facts.end.code == _BOX_CANNOT_RUN and not facts.answered,
        OutcomeKind.SANDBOX_FAILED,
        Cause.HARNESS,
    ),
    OutcomeRule(
        lambda facts: facts.end.ending is Ending.EXITED and facts.end.code in _SHELL_CANNOT_RUN and not facts.answered,
        OutcomeKind.NOT_STARTED,
        Cause.AGENT,
    ),
    OutcomeRule(lambda facts: facts.end.ending is Ending.TIMED_OUT, OutcomeKind.TIMED_OUT, Cause.LIMIT),
    OutcomeRule(lambda facts: facts.end.ending is Ending.STOPPED, OutcomeKind.DRAINED, Cause.LIMIT),
    OutcomeRule(lambda facts: facts.end.ending is Ending.KILLED, OutcomeKind.CRASHED, Cause.AGENT),
    OutcomeRule(lambda facts: facts.has_ended_well and bool(facts.result.garbage), OutcomeKind.GARBAGE, Cause.AGENT),
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
    """Return the outcome of a rollout with a session."""
    rule = next(rule for rule in RULES if rule.holds(facts))
    return Outcome(rule.kind, rule.cause, describe(facts))


def was_lost(end: AgentEnd, outcome: Outcome) -> bool:
    """Return True if engine, server, sandbox or machine ended the rollout, so that its agent may start again."""
    is_killed = end.ending is Ending.KILLED and end.code in (Signals.SIGKILL, Signals.SIGTERM)
    return is_killed or outcome.cause in (Cause.ENGINE, Cause.HARNESS)


def classify_uncreated(code: str, status: int, message: str) -> Outcome:
    """Return the outcome of a rollout whose session could not be created. Status 0 means no answer."""
    detail = f"no session: {message}"
    if code == GateClosed.code:
        return Outcome(OutcomeKind.DRAINED, Cause.LIMIT, detail)
    if code in ENGINE_CODES:
        return Outcome(OutcomeKind.ENGINE_FAILED, Cause.ENGINE, detail)
    if 400 <= status < 500:
        return Outcome(OutcomeKind.NOT_STARTED, Cause.SCENARIO, detail)
    return Outcome(OutcomeKind.HARNESS_FAILED, Cause.HARNESS, detail)


def describe(facts: RolloutFacts) -> str:
    parts = [facts.end.words, count_words(facts.answered, "turn")]
    if facts.failed:
        parts.append(f"{count_words(facts.failed, 'turn')} failed")
    if facts.refusals:
        refused = ", ".join(f"{code} x{count}" for code, count in sorted(facts.refusals.items()))
        parts.append(f"refused: {refused}")
    if facts.result.garbage:
        parts.append(f"result unusable: {facts.result.garbage}")
    if facts.session_lost is not None:
        parts.append(f"session not readable: {facts.session_lost}")
    return "; ".join(parts)


def count_words(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
