"""Sampling scale: checks that behavior logprobs describe the distribution of the tokens. Pure.

Engines report raw logprobs. With other temperature, top-p, top-k or min-p, ratios to them are silently wrong. With
sampling masks logprobs are over the candidates, so that only the temperature counts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from harness.errors import StepError
from harness.samples.rollout import Rollout
from harness.samples.segments import Segment
from harness.samples.versions import NOT_SAMPLED
from harness.token_rows import RowState
from harness.types import Json, Sample

ON_SCALE: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling parameters with their neutral values."""


class OffScale(StrEnum):
    REFUSE = "refuse"
    """Raise `StepError`."""
    ALLOW = "allow"
    """Train, and set `metadata["off_scale"]`."""


def require_on_scale(sampling: Json, off_scale: OffScale, *, where: str) -> None:
    """Raise `StepError` for a parameter in `sampling` that is not neutral."""
    found = _deviations(sampling)
    if found and off_scale is OffScale.REFUSE:
        name, value = next(iter(found.items()))
        raise StepError(
            f"{where}: {name} is {value}; behavior logprobs are raw, so tokens have to be drawn with {name}"
            f" {ON_SCALE[name]:g}. Set it in the sampling parameters of the session, which override the agent's,"
            ' record the `sampling_mask` of filtered tokens (docs/replay.md), or allow it with off_scale="allow"'
        )


def stamp_scale(rollout: Rollout, off_scale: OffScale) -> Rollout:
    """Return `rollout` with off-scale parameters in its samples' metadata. Raises `StepError`."""
    turns = {each.number: each for each in _trained_turns(rollout.session)}
    for turn in turns.values():
        require_on_scale(turn.used, off_scale, where=f"session {rollout.session_id}, turn {turn.number}")

    def stamp(sample: Sample) -> Sample:
        found: dict[str, float] = {}
        for number in sample.metadata.get("turns", ()):
            found |= _deviations(turns[number].used) if number in turns else {}
        return replace(sample, metadata={**sample.metadata, "off_scale": found}) if found else sample

    return replace(rollout, samples=tuple(stamp(sample) for sample in rollout.samples))


def forget_constrained(segment: Segment, rollout: Rollout, sample: Sample) -> Segment:
    """Mark trained tokens of turns that forbade tokens as not sampled."""
    # A minimum length or a grammar also changes the distribution, and a missing mask leaves it unknown. Such tokens are
    # trained by cross-entropy without a ratio, weighted by their advantages, which stay.
    told, size = set(sample.metadata.get("turns", ())), len(segment)
    is_unknown, has_mask = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    if segment.sampling_mask is not None:
        has_mask[: len(segment.sampling_mask.states)] = segment.sampling_mask.states == RowState.PRESENT
    for turn in _trained_turns(rollout.session):
        if turn.number in told and turn.forbids_tokens:
            is_unknown[turn.start : turn.end] = True
        elif turn.number in told and turn.used.get("sampling_mask"):
            is_unknown[turn.start : turn.end] = ~has_mask[turn.start : turn.end]
    if not is_unknown.any():
        return segment
    columns = {
        name: getattr(segment, name).copy()
        for name in ("behavior_logprobs", "proximal_logprobs", "behavior_versions", "proximal_versions")
    }
    for name, column in columns.items():
        column[is_unknown] = NOT_SAMPLED if name.endswith("versions") else 0.0
    return replace(segment, **columns)


class _TrainedTurn(NamedTuple):
    """Unscripted turn, tokens `start..end` of a sample."""

    number: int
    start: int
    end: int
    used: Json

    @property
    def forbids_tokens(self) -> bool:
        return self.used.get("json_schema") is not None or self.used.get("min_new_tokens", 0) > 0


def _trained_turns(session: Json) -> Iterator[_TrainedTurn]:
    for turn in session.get("turns", ()):
        if turn["script_step"] is None and turn["output_length"]:
            start = turn["prompt_length"]
            yield _TrainedTurn(turn["turn"], start, start + turn["output_length"], turn["sampling"]["used"])


def _deviations(sampling: Json) -> dict[str, float]:
    names = ("temperature",) if sampling.get("sampling_mask") else ON_SCALE
    stated = ((name, sampling.get(name)) for name in names)
    return {name: value for name, value in stated if value is not None and value != ON_SCALE[name]}
