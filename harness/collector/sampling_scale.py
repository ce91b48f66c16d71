"""Are the behavior logprobs of a rollout those of the distribution that its tokens were drawn from? Pure.

Engines report raw logprobs. Sampling at another temperature than 1, or with top-p, top-k or min-p, draws from another
distribution than they describe, and a ratio to them is wrong without anybody noticing. That is refused, or allowed by
name and stamped into every sample.

A least length or a grammar forbids tokens, too. Turns of that kind are trained by cross-entropy, without a ratio: their
tokens lose their behavior values on the way to the learner.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from harness.errors import StepError
from harness.samples.rollout import Rollout
from harness.samples.segments import Segment
from harness.samples.versions import NOT_SAMPLED
from harness.types import Json, Sample

ON_SCALE: Mapping[str, float] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Parameters that change the distribution, with the values that leave it as it is."""


class OffScale(StrEnum):
    """What becomes of tokens that were not drawn from the distribution that their logprobs describe."""

    REFUSE = "refuse"
    """Training stops with `StepError`."""
    ALLOW = "allow"
    """They are trained, and their samples say so: `metadata["off_scale"]`."""


def require_on_scale(sampling: Json, off_scale: OffScale, *, where: str) -> None:
    """Raises `StepError` that names the parameter of `sampling` that draws from another distribution, if one does.

    `where` says whose parameters they are, for the message.
    """
    found = _deviations(sampling)
    if found and off_scale is OffScale.REFUSE:
        name, value = next(iter(found.items()))
        raise StepError(
            f"{where}: {name} is {value}; behavior logprobs are raw, so tokens have to be drawn with {name}"
            f" {ON_SCALE[name]:g}. Set it in the sampling parameters of the session, which override the agent's, or"
            ' allow it with off_scale="allow"'
        )


def stamp_scale(rollout: Rollout, off_scale: OffScale) -> Rollout:
    """`rollout`, with the parameters by which its tokens are off scale in the metadata of every sample they concern.

    Raises `StepError` like `require_on_scale`.
    """
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
    """`segment` of `sample`, with the tokens to train of turns that forbade tokens as if nobody had sampled them.

    They keep their advantages, as the weights of their cross-entropy.
    """
    told = set(sample.metadata.get("turns", ()))
    constrained = [turn for turn in _trained_turns(rollout.session) if turn.number in told and turn.forbids_tokens]
    if not constrained:
        return segment
    columns = {
        name: getattr(segment, name).copy()
        for name in ("behavior_logprobs", "proximal_logprobs", "behavior_versions", "proximal_versions")
    }
    for turn in constrained:
        for name, column in columns.items():
            column[turn.start : turn.end] = NOT_SAMPLED if name.endswith("versions") else 0.0
    return replace(segment, **columns)


class _TrainedTurn(NamedTuple):
    """A turn that the model chose the words of, and where its output lies in a sample: tokens `start..end`."""

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
    stated = ((name, sampling.get(name)) for name in ON_SCALE)
    return {name: value for name, value in stated if value is not None and value != ON_SCALE[name]}
