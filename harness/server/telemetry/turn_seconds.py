"""Seconds of a turn by place: gate, pool queue, engine."""

from typing import NamedTuple

from harness.types import Turn


class TurnSeconds(NamedTuple):
    """Disjoint; the rest is the session server's own time."""

    gate: float
    """Held at the gate or for a weight update."""
    queue: float
    """Waiting for a worker of the pool."""
    engine: float
    """From request to answer, its own queue and transport included."""


def measure_turn(turn: Turn, prior: Turn | None = None) -> TurnSeconds:
    """Measure `turn`, less its interrupted attempt `prior`."""
    gate, queue, asked = _sums(turn)
    if prior is not None:
        before = _sums(prior)
        gate, queue, asked = gate - before[0], queue - before[1], asked - before[2]
    return TurnSeconds(max(0.0, gate), max(0.0, queue), max(0.0, asked - queue))


def _sums(turn: Turn) -> tuple[float, float, float]:
    held = turn.notes.held_before_s + turn.notes.held_s
    queued = sum(segment.queued_s for segment in turn.segments)
    return held, queued, sum(segment.seconds for segment in turn.segments)
