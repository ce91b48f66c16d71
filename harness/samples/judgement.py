"""Judgement: the figures and the reason with a reward, as samples carry them. Pure."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from harness.types import Json, Sample


def stated_number(value: object) -> float | None:
    """Return a finite number that an agent or a check states, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def describe_judgement(figures: Mapping[str, float], reason: str) -> Json:
    """Return the `figures` and the `reason`, without those that are empty."""
    given = {"figures": dict(figures), "reason": reason}
    return {name: value for name, value in given.items() if value}


def stamp_judgement(samples: Iterable[Sample], judgement: Json) -> tuple[Sample, ...]:
    """Set `metadata["score"]` on all samples of a rollout, unless `judgement` is empty."""
    if not judgement:
        return tuple(samples)
    return tuple(replace(each, metadata={**each.metadata, "score": judgement}) for each in samples)
