"""The input and the report of an abort: its order, its budget, and which results are failures. Pure.

The order of `ORDER` is the choreography. Every step has a time of its own and all of them share `total_s`, of which the
time to reopen the gates is never given away (I8): whatever the steps before it cost, the last one can still be taken.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from harness.machine.deadlines import bound_of_call
from harness.samples.rollout import OutcomeKind, Rollout
from harness.sessions.gate import GateReport
from harness.types import Sample, SampleStatus


class AbortStep(StrEnum):
    """The steps of an abort, in `ORDER`."""

    MARK = "mark"
    """Nothing begins any more."""
    DRAIN = "drain"
    """Every session server ends its open sessions, or those that are named, for good."""
    ENGINES = "engines"
    """Every engine worker ends its requests, or those of the sessions that are named."""
    HOOKS = "hooks"
    """The runners of agents ask them to stop."""
    STOP = "stop"
    """Agents have time to end by themselves, then they are ended."""
    COLLECT = "collect"
    """Every pending task returns, or is cancelled."""
    RESUME = "resume"
    """Every session server serves new sessions again; with named sessions none had stopped."""


ORDER = tuple(AbortStep)


class Keep(StrEnum):
    """How much to keep of rollouts that the abort cuts short."""

    NOTHING = "nothing"
    """Their samples are not reported."""
    SAMPLES = "partial_samples"
    """Their samples are reported."""
    SESSIONS = "sessions"
    """Their samples are reported, and their sessions stay on the server until a later rollout takes them over, or
    `SessionManager.delete` gives them back."""


@dataclass(frozen=True, slots=True)
class AbortBudget:
    """Seconds that the steps of an abort may take, each at most; `total_s` bounds all of them together."""

    drain_s: float = 10.0
    engines_s: float = 10.0
    """For the engines to end their requests, the look at those that are paused included; a router has as long before
    the first step to name its workers."""
    hooks_s: float = 10.0
    """For hooks to ask the agents to stop; a mark told elsewhere has as long before the drain."""
    agents_s: float = 10.0
    """For agents to end by themselves, before SIGTERM."""
    kill_s: float = 5.0
    """From SIGTERM until the last agent is gone; SIGKILL comes in the middle of it."""
    collect_s: float = 30.0
    """For pending tasks to return, once no agent runs any more."""
    cancel_s: float = 5.0
    """For a pending task to obey its cancellation; one that does not is left alone and reported."""
    resume_s: float = 10.0
    """For gates to open and hooks to be cleared, the last step; this and `cancel_s` are kept back from `total_s`."""
    total_s: float = 90.0
    hold_ttl_s: float = 60.0
    """How long gates stay shut when this process dies; holds are renewed every third of it."""

    @property
    def working_s(self) -> float:
        """The time of the steps before the last together, if nothing has to be cancelled."""
        return max(0.0, self.total_s - self.resume_s - self.cancel_s)

    def left_s(self, wanted_s: float, elapsed_s: float) -> float:
        """How much of `wanted_s` the calls of a step may use that begins `elapsed_s` after the first one."""
        return min(wanted_s, bound_of_call(self.working_s - elapsed_s))


@dataclass(frozen=True, slots=True)
class AgentHooks:
    """Callbacks of a runner of agents, step by step; all are optional. `SessionManager.abort_hooks()` makes one."""

    name: str
    mark: Callable[[Keep], Awaitable[object] | None] = lambda _: None
    """Begin nothing from now on; the argument says what to keep. What it returns to await comes before the drain."""
    abort: Callable[[], Awaitable[object]] | None = None
    """Ask the agents to stop."""
    stop: Callable[[float], Awaitable[Sequence[str]]] | None = None
    """End the agents that still run within so many seconds; returns the names of those that are left even then."""
    clear: Callable[[], Awaitable[object] | None] = lambda: None
    """The abort is over: what begins from now on has nothing to do with it."""


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """The answer of a session server to a verb of its gate."""

    url: str
    error: str | None = None
    """Why it could not be told; None when it was."""
    gate: GateReport | None = None
    """How its gate stands since, and what the verb touched; None when it did not answer, or was asked to drain some
    sessions and no more."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Why it was not told, or which of its shards were not; empty when all were."""
        if self.error is not None:
            return (self.error,)
        return () if self.gate is None else self.gate.problems


@dataclass(frozen=True, slots=True)
class CallReport:
    """Whether an engine worker or a hook did what it was asked."""

    name: str
    error: str | None = None


class Fate(StrEnum):
    """Why a pending task has no result."""

    RAISED = "raised"
    """It ended with an exception."""
    CANCELLED = "cancelled"
    """Somebody else had cancelled it."""
    LATE = "late"
    """It did not end in its time and was cancelled."""
    LEFT = "left"
    """It ignored its cancellation and still runs."""


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """A pending task that was skipped."""

    name: str
    fate: Fate
    detail: str = ""


@dataclass(frozen=True, slots=True)
class AbortReport:
    """The course of an abort and everything it collected."""

    drained: tuple[ServerAnswer, ...] = ()
    engines: tuple[CallReport, ...] = ()
    left_paused: tuple[CallReport, ...] = ()
    """Workers that were found paused and covered by no hold; without an error those that were continued."""
    turns_left: int | None = None
    """Turns still in flight when the engines step ended; None when no session server could say."""
    hooks: tuple[CallReport, ...] = ()
    agents_left: tuple[str, ...] = ()
    """Agents that could not be ended in their time."""
    results: tuple[object, ...] = ()
    """Of the pending tasks that ended well, in their order."""
    failures: tuple[TaskFailure, ...] = ()
    """The pending tasks that did not."""
    partial_samples: tuple[Sample, ...] = ()
    """Samples of the rollouts that were cut short."""
    resumed: tuple[ServerAnswer, ...] = ()
    seconds: Mapping[AbortStep, float] = field(default_factory=dict)
    """Of each step; a step that was not reached is missing. Asking a router for its workers, which comes before the
    first one, is time of the engines."""

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        """The rollouts among the results."""
        return tuple(rollouts_in(self.results))

    @property
    def total_s(self) -> float:
        """Seconds of the whole abort."""
        return sum(self.seconds.values())

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for everything that did not go as it should; empty after a clean abort."""
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
    """Why `task` has no result to collect: it ended with `end`, or not at all."""
    name = task.get_name() if isinstance(task, asyncio.Task) else "future"
    match end:
        case None:
            return TaskFailure(name, Fate.LEFT, "ignores its cancellation")
        case asyncio.CancelledError():
            return TaskFailure(name, Fate.LATE if was_late else Fate.CANCELLED)
        case _:
            return TaskFailure(name, Fate.RAISED, f"{type(end).__name__}: {end}")


def rollouts_in(result: object) -> Iterator[Rollout]:
    """The rollouts in what a pending task returned: one, or lists of them in any depth."""
    match result:
        case Rollout():
            yield result
        case list() | tuple():
            for part in result:
                yield from rollouts_in(part)


def partial_samples(results: Sequence[object], rollout_id: int | None) -> tuple[Sample, ...]:
    """The samples of the rollouts that an abort cut short, each with the `start_rollout_id` of its first rollout."""
    samples = [sample for rollout in rollouts_in(results) if was_cut_short(rollout) for sample in rollout.samples]
    if rollout_id is None:
        return tuple(samples)
    return tuple(replace(sample, metadata={"start_rollout_id": rollout_id, **sample.metadata}) for sample in samples)


def was_cut_short(rollout: Rollout) -> bool:
    """The rollout did not come to an end of its own."""
    return rollout.outcome.kind is OutcomeKind.DRAINED or any(
        sample.status is SampleStatus.ABORTED for sample in rollout.samples
    )
