"""The seconds of a turn by where they went: at the gate, in the queue of a pool, in the engine."""

from typing import NamedTuple

from harness.types import Turn


class TurnSeconds(NamedTuple):
    """Disjoint; the rest of a turn is the session server's own work."""

    gate: float
    """Held there, before its admission too, or for an update of the weights."""
    queue: float
    """Waiting in the session server for a worker of its pool."""
    engine: float
    """From the request to its answer, the engine's own queue and the way there included."""


def measure_turn(turn: Turn, prior: Turn | None = None) -> TurnSeconds:
    """The seconds of `turn`, less those of `prior`: the same turn as it broke off before it went on."""
    gate, queue, asked = _sums(turn)
    if prior is not None:
        before = _sums(prior)
        gate, queue, asked = gate - before[0], queue - before[1], asked - before[2]
    return TurnSeconds(max(0.0, gate), max(0.0, queue), max(0.0, asked - queue))


def _sums(turn: Turn) -> tuple[float, float, float]:
    held = float(turn.notes.get("held_before_s", 0.0)) + float(turn.notes.get("held_s", 0.0))
    queued = sum(segment.queued_s for segment in turn.segments)
    return held, queued, sum(segment.seconds for segment in turn.segments)
