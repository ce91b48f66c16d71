"""Steps, budget and report of a weight update. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.engines.base import PauseMode
from harness.samples.versions import is_unsettled, is_version
from harness.sessions.weights.weight_update import LiveWeights, SweepReport


class UpdateStep(StrEnum):
    SWEEP = "sweep"
    """Score tokens that wait for the old version."""
    PAUSE_GATES = "pause_gates"
    """Hold new turns."""
    PAUSE_ENGINES = "pause_engines"
    """End or freeze requests."""
    APPLY = "apply"
    """Load the weights."""
    VERIFY = "verify"
    """Read versions; fence workers left behind."""
    CONTINUE = "continue"
    """Continue sampling."""
    RESUME_GATES = "resume_gates"
    """Release held turns."""


@dataclass(frozen=True, slots=True)
class UpdateBudget:
    connect_s: float = 30.0
    """Time to connect to engines by address."""
    sweep_s: float = 60.0
    """0 skips the sweep."""
    sweep_concurrency: int = 8
    """Sessions scored at once, per server."""
    gate_s: float = 10.0
    pause_s: float = 60.0
    apply_s: float = 600.0
    verify_s: float = 10.0
    continue_s: float = 60.0
    """Time for retries; then session servers retry."""
    turn_s: float = 150.0
    """Wait for another update; longer than a dead one's hold."""
    hold_ttl_s: float = 60.0
    """Seconds that everything stays paused if this process dies; renewed every third of it."""


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    name: str
    weight_version: str
    error: str | None = None
    """Reason why it does not serve the version."""
    is_fenced: bool = False
    """True until it catches up and serves again."""


@dataclass(slots=True)
class ServerUpdate:
    url: str
    sweep: SweepReport | None = None
    weights: LiveWeights | None = None
    """Its view of the workers afterwards."""
    errors: dict[UpdateStep, str] = field(default_factory=dict)


@dataclass(slots=True)
class UpdateReport:
    version: int
    mode: PauseMode
    workers: tuple[WorkerUpdate, ...] = ()
    servers: tuple[ServerUpdate, ...] = ()
    samples: SweepReport | None = None
    """Sweep of samples that left their sessions."""
    engine_errors: dict[UpdateStep, list[str]] = field(default_factory=dict)
    seconds: dict[UpdateStep, float] = field(default_factory=dict)

    def note(self, step: UpdateStep, error: str) -> None:
        self.engine_errors.setdefault(step, []).append(error)

    @property
    def pause_s(self) -> float:
        """Seconds that agents waited."""
        return sum(seconds for step, seconds in self.seconds.items() if step is not UpdateStep.SWEEP)

    @property
    def updated(self) -> tuple[WorkerUpdate, ...]:
        return tuple(worker for worker in self.workers if worker.error is None)

    @property
    def unsettled(self) -> tuple[WorkerUpdate, ...]:
        """Workers in which the update broke off, still paused."""
        return tuple(worker for worker in self.workers if is_unsettled(worker.weight_version))

    @property
    def problems(self) -> tuple[str, ...]:
        """One line per problem."""
        return (
            *(f"worker {each.name}: {each.error}" for each in self.workers if each.error),
            *(f"{step}: {error}" for step, errors in self.engine_errors.items() for error in errors),
            *(f"{step} {each.url}: {error}" for each in self.servers for step, error in each.errors.items()),
            *(f"{each.url}: {what}" for each in self.servers if each.weights for what in _find_outdated(each.weights)),
            *(f"sweep {each.url}: {words}" for each in self.servers if (words := _describe_left(each.sweep))),
            *(f"sweep of samples: {words}" for words in [_describe_left(self.samples)] if words),
        )

    def telemetry(self) -> Mapping[str, float]:
        """Return metrics with fixed keys."""
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
    yield from weights.problems
    if not weights.serving:
        kept = ", ".join(f"{name} has {label!r}" for name, label in weights.fenced.items()) or "there is no worker"
        yield f"no worker serves sessions: {kept}"
    for name, label in weights.serving.items():
        if not is_version(label, weights.version):
            yield f"sessions are served by {name} under weight version {label!r}, expected {str(weights.version)!r}"


def _describe_left(sweep: SweepReport | None) -> str:
    if sweep is None or not sweep.tokens_left:
        return ""
    return f"{sweep.tokens_left} of {sweep.tokens_waiting} tokens were not scored and keep their behavior values"
