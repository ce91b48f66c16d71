"""The input and the report of a weight update: steps, budget, outcomes. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.engines.base import PauseMode
from harness.samples.versions import is_unsettled, is_version
from harness.sessions.weights.weight_update import LiveWeights, SweepReport


class UpdateStep(StrEnum):
    """The steps of an update, in their order."""

    SWEEP = "sweep"
    """Session servers score what waits for the version that is about to go; turns go on."""
    PAUSE_GATES = "pause_gates"
    """Session servers hold new turns."""
    PAUSE_ENGINES = "pause_engines"
    """Engines end or freeze what they work on."""
    APPLY = "apply"
    """Workers load the weights."""
    VERIFY = "verify"
    """Every worker says what it serves; those left behind are fenced."""
    CONTINUE = "continue"
    """Engines work again."""
    RESUME_GATES = "resume_gates"
    """Session servers let the held turns go, and the interrupted ones go on."""


@dataclass(frozen=True, slots=True)
class UpdateBudget:
    """Seconds that each step may take."""

    connect_s: float = 30.0
    """To reach the engines that are named by their addresses, all at once."""
    sweep_s: float = 60.0
    """0 leaves the sweep out."""
    sweep_concurrency: int = 8
    """Sessions of a server that are scored at the same time."""
    gate_s: float = 10.0
    pause_s: float = 60.0
    apply_s: float = 600.0
    verify_s: float = 10.0
    continue_s: float = 60.0
    """An engine that fails to go on is asked again for so long; after that its session servers go on asking."""
    turn_s: float = 150.0
    """For another update that has the engines to end; longer than the hold of one that has died."""
    hold_ttl_s: float = 60.0
    """How long gates and engines stay as they are when this process dies; holds are renewed every third of it."""


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """One engine worker after an update."""

    name: str
    weight_version: str
    """As it reports itself."""
    error: str | None = None
    """Why it does not serve the version; None when it does."""
    is_fenced: bool = False
    """It serves no session until it has caught up."""


@dataclass(slots=True)
class ServerUpdate:
    """One session server during an update."""

    url: str
    sweep: SweepReport | None = None
    weights: LiveWeights | None = None
    """Its own view of the workers afterwards."""
    errors: dict[UpdateStep, str] = field(default_factory=dict)


@dataclass(slots=True)
class UpdateReport:
    """The course of an update, worker by worker and server by server."""

    version: int
    mode: PauseMode
    workers: tuple[WorkerUpdate, ...] = ()
    servers: tuple[ServerUpdate, ...] = ()
    samples: SweepReport | None = None
    """The sweep of samples that had left their sessions."""
    engine_errors: dict[UpdateStep, list[str]] = field(default_factory=dict)
    seconds: dict[UpdateStep, float] = field(default_factory=dict)

    def note(self, step: UpdateStep, error: str) -> None:
        """Keep what went wrong with the engines at `step`."""
        self.engine_errors.setdefault(step, []).append(error)

    @property
    def pause_s(self) -> float:
        """For how long agents waited: everything but the sweep."""
        return sum(seconds for step, seconds in self.seconds.items() if step is not UpdateStep.SWEEP)

    @property
    def updated(self) -> tuple[WorkerUpdate, ...]:
        """The workers that serve the version."""
        return tuple(worker for worker in self.workers if worker.error is None)

    @property
    def unsettled(self) -> tuple[WorkerUpdate, ...]:
        """The workers in which the update broke off: they stay paused, and serve nobody until another one succeeds."""
        return tuple(worker for worker in self.workers if is_unsettled(worker.weight_version))

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for everything that did not go as it should; empty after a clean update."""
        return (
            *(f"worker {each.name}: {each.error}" for each in self.workers if each.error),
            *(f"{step}: {error}" for step, errors in self.engine_errors.items() for error in errors),
            *(f"{step} {each.url}: {error}" for each in self.servers for step, error in each.errors.items()),
            *(f"{each.url}: {what}" for each in self.servers if each.weights for what in _find_outdated(each.weights)),
            *(f"sweep {each.url}: {words}" for each in self.servers if (words := _describe_left(each.sweep))),
            *(f"sweep of samples: {words}" for words in [_describe_left(self.samples)] if words),
        )

    def telemetry(self) -> Mapping[str, float]:
        """Fixed keys for whoever logs numbers per step."""
        sweeps = [sweep for sweep in (*(each.sweep for each in self.servers), self.samples) if sweep]
        return {
            "weights/version": self.version,
            "weights/pause_seconds": self.pause_s,
            "weights/sweep_seconds": self.seconds.get(UpdateStep.SWEEP, 0.0),
            "weights/workers_updated": len(self.updated),
            "weights/workers_fenced": sum(worker.is_fenced for worker in self.workers),
            "weights/proximal_tokens_settled": sum(sweep.tokens_settled for sweep in sweeps),
            "weights/proximal_tokens_left": sum(sweep.tokens_left for sweep in sweeps),
        }


def _find_outdated(weights: LiveWeights) -> Iterator[str]:
    """Workers that serve sessions with other weights, where none has taken their place; a server that has nobody, or
    whose shards did not all say.
    """
    yield from weights.problems
    if not weights.serving:
        kept = ", ".join(f"{name} has {label!r}" for name, label in weights.fenced.items()) or "there is no worker"
        yield f"sessions are served by nobody: {kept}"
    for name, label in weights.serving.items():
        if not is_version(label, weights.version):
            yield f"sessions are served by {name} under weight version {label!r}, expected {str(weights.version)!r}"


def _describe_left(sweep: SweepReport | None) -> str:
    if sweep is None or not sweep.tokens_left:
        return ""
    return f"{sweep.tokens_left} of {sweep.tokens_waiting} tokens were not scored and keep their behavior values"
