"""Steps, budget and report of an abort. Pure. Time to reopen the gates is reserved (I8): that step always runs."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from harness.machine.deadlines import bound_of_call
from harness.samples.rollout import OutcomeKind, Rollout
from harness.sessions.gate import GateReport
from harness.types import Sample, SampleStatus


class AbortStep(StrEnum):
    MARK = "mark"
    """Stop new work."""
    DRAIN = "drain"
    """Drain the sessions for good."""
    ENGINES = "engines"
    """End their requests in the engines."""
    HOOKS = "hooks"
    """Ask the agents to stop."""
    STOP = "stop"
    """Wait for the agents, then kill them."""
    COLLECT = "collect"
    """Collect the pending tasks, or cancel them."""
    RESUME = "resume"
    """Release the gates."""


class Keep(StrEnum):
    """Amount to keep of rollouts cut short."""

    NOTHING = "nothing"
    """No samples."""
    SAMPLES = "partial_samples"
    SESSIONS = "sessions"
    """Samples, and sessions until a later rollout or `SessionManager.delete` takes them."""


@dataclass(frozen=True, slots=True)
class AbortBudget:
    """Maximum seconds of each step, and in total."""

    drain_s: float = 10.0
    engines_s: float = 10.0
    """Includes the search for paused workers; listing a router's workers gets as long again."""
    hooks_s: float = 10.0
    """Also limits the mark."""
    agents_s: float = 10.0
    """Time for agents to end, before SIGTERM."""
    kill_s: float = 5.0
    """Time after SIGTERM; SIGKILL comes halfway."""
    collect_s: float = 30.0
    cancel_s: float = 5.0
    """Time for a cancelled task to end."""
    resume_s: float = 10.0
    """Time of the last step; reserved, like `cancel_s`."""
    total_s: float = 90.0
    hold_ttl_s: float = 60.0
    """Seconds that gates stay shut if this process dies; renewed every third of it."""

    @property
    def working_s(self) -> float:
        return max(0.0, self.total_s - self.resume_s - self.cancel_s)

    def left_s(self, wanted_s: float, elapsed_s: float) -> float:
        """Limit `wanted_s` for a step that begins after `elapsed_s`."""
        return min(wanted_s, bound_of_call(self.working_s - elapsed_s))


@dataclass(frozen=True, slots=True)
class AgentHooks:
    """Optional callbacks of an agent runner."""

    name: str
    mark: Callable[[Keep], Awaitable[object] | None] = lambda _: None
    """Start no new work; awaited before the drain."""
    abort: Callable[[], Awaitable[object]] | None = None
    """Ask the agents to stop."""
    stop: Callable[[float], Awaitable[Sequence[str]]] | None = None
    """Kill the agents within so many seconds. Return survivors."""
    clear: Callable[[], Awaitable[object] | None] = lambda: None
    """End the abort."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    url: str
    error: str | None = None
    gate: GateReport | None = None
    """Gate afterwards, if reported."""

    @property
    def problems(self) -> tuple[str, ...]:
        if self.error is not None:
            return (self.error,)
        return () if self.gate is None else self.gate.problems


@dataclass(frozen=True, slots=True)
class CallReport:
    name: str
    error: str | None = None


class Fate(StrEnum):
    """Reason for a task without result."""

    RAISED = "raised"
    CANCELLED = "cancelled"
    """Another caller cancelled it."""
    LATE = "late"
    """It was cancelled because it was late."""
    LEFT = "left"
    """It ignored its cancellation and still runs."""


@dataclass(frozen=True, slots=True)
class TaskFailure:
    name: str
    fate: Fate
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AbortReport:
    drained: tuple[ServerAnswer, ...] = ()
    engines: tuple[CallReport, ...] = ()
    left_paused: tuple[CallReport, ...] = ()
    """Workers paused under no hold; without an error they were continued."""
    turns_left: int | None = None
    """Turns in flight afterwards; None if unknown."""
    hooks: tuple[CallReport, ...] = ()
    agents_left: tuple[str, ...] = ()
    """Agents that could not be killed."""
    results: tuple[object, ...] = ()
    failures: tuple[TaskFailure, ...] = ()
    partial_samples: tuple[Sample, ...] = ()
    resumed: tuple[ServerAnswer, ...] = ()
    seconds: Mapping[AbortStep, float] = field(default_factory=dict)
    """Seconds by step; listing a router's workers counts as ENGINES."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(rollouts_in(self.results))

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per problem."""
        return (
            *(f"drain {answer.url}: {problem}" for answer in self.drained for problem in answer.problems),
            *(f"engine {answer.name}: {answer.error}" for answer in self.engines if answer.error),
            *(f"engine {answer.name}: {answer.error}" for answer in self.left_paused if answer.error),
            *((f"engines: {self.turns_left} turns still in flight",) if self.turns_left else ()),
            *(f"hook {answer.name}: {answer.error}" for answer in self.hooks if answer.error),
            *(f"agent {name}: could not be ended" for name in self.agents_left),
            *(f"task {failure.name}: {failure.fate} {failure.detail}".rstrip() for failure in self.failures),
            *(f"resume {answer.url}: {problem}" for answer in self.resumed for problem in answer.problems),
        )


def failure_of(task: asyncio.Future[object], end: BaseException | None, *, was_late: bool) -> TaskFailure:
    """Describe why `task` has no result; without `end` it still runs."""
    name = task.get_name() if isinstance(task, asyncio.Task) else "future"
    match end:
        case None:
            return TaskFailure(name, Fate.LEFT, "ignores its cancellation")
        case asyncio.CancelledError():
            return TaskFailure(name, Fate.LATE if was_late else Fate.CANCELLED)
        case _:
            return TaskFailure(name, Fate.RAISED, f"{type(end).__name__}: {end}")


def rollouts_in(result: object) -> Iterator[Rollout]:
    """Yield the rollouts in a result, nested lists included."""
    match result:
        case Rollout():
            yield result
        case list() | tuple():
            for part in result:
                yield from rollouts_in(part)


def partial_samples(results: Sequence[object], rollout_id: int | None) -> tuple[Sample, ...]:
    """Return samples of rollouts cut short, with a `start_rollout_id`."""
    samples = [sample for rollout in rollouts_in(results) if was_cut_short(rollout) for sample in rollout.samples]
    if rollout_id is None:
        return tuple(samples)
    return tuple(replace(sample, metadata={"start_rollout_id": rollout_id, **sample.metadata}) for sample in samples)


def was_cut_short(rollout: Rollout) -> bool:
    """Return True if the rollout did not end by itself."""
    return rollout.outcome.kind is OutcomeKind.DRAINED or any(
        sample.status is SampleStatus.ABORTED for sample in rollout.samples
    )
