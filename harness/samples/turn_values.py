"""Turn values: the expected reward of the state before a turn, estimated from forks. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import nan

from harness.errors import ScenarioError
from harness.samples.delivery import turn_spans
from harness.samples.turn_rewards import TurnValue, spread_over_tokens
from harness.types import Json, Sample


def value_turns(samples: Sequence[Sample], values: Mapping[int, TurnValue]) -> tuple[Sample, ...]:
    """Set `turn_values` on all delivered samples of a session, by turn index; NaN for other turns and context.

    `metadata["turn_values"]` keeps `mean`, `low`, `high` and `forks`. Raises `ScenarioError` for an unknown turn or a
    value that is not finite.
    """
    if not values:
        return tuple(samples)
    known = {turn for sample in samples for turn, _ in turn_spans(sample)}
    if unknown := sorted(values.keys() - known):
        raise ScenarioError(f"turn_values: expected turns of the samples, {sorted(known)}; got turn {unknown[0]}")
    means = {turn: value.mean for turn, value in values.items()}
    return tuple(
        replace(
            sample,
            turn_values=spread_over_tokens(sample, means, missing=nan),
            metadata={**sample.metadata, "turn_values": _described(sample, values)},
        )
        for sample in samples
    )


def values_of(samples: Sequence[Sample]) -> dict[int, float]:
    """Return the values of a rollout's trained turns, in order; NaN for those without one."""
    found: dict[int, float] = {}
    for sample in samples:
        for turn, span in turn_spans(sample):
            if sample.loss_mask[span].any():
                found[turn] = float(sample.turn_values[span.start]) if sample.turn_values.size else nan
    return dict(sorted(found.items())) or {-1: nan}


def _described(sample: Sample, values: Mapping[int, TurnValue]) -> Json:
    return {str(turn): values[turn]._asdict() for turn, _ in turn_spans(sample) if turn in values}
