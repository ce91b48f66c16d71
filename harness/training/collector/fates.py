"""Fates of rollouts, by outcome.

An engine or harness failure says nothing about the policy, so the rollout is replaced. An agent failure may be the
policy's doing: the trainer chooses.
"""

from collections.abc import Mapping
from enum import StrEnum

from harness.samples.rollout import OutcomeKind


class RolloutFate(StrEnum):
    """Consequence of a rollout for its place in a step."""

    KEPT = "kept"
    """Fills its place in the step."""
    COUNTED = "counted"
    """Fills its place, untrained."""
    REPLACED = "replaced"
    """Another attempt takes its place."""


class OnFailure(StrEnum):
    """Choice for agent failures."""

    REPLACE = "replace"
    COUNT = "count"


FATES: Mapping[OutcomeKind, RolloutFate | None] = {
    OutcomeKind.FINISHED: RolloutFate.KEPT,
    OutcomeKind.LIMITED: RolloutFate.KEPT,
    OutcomeKind.NO_MODEL_CALL: None,
    OutcomeKind.CRASHED: None,
    OutcomeKind.GARBAGE: None,
    OutcomeKind.TIMED_OUT: None,
    OutcomeKind.DRAINED: RolloutFate.REPLACED,  # by a client or operator: rollouts that a step ends never come here
    OutcomeKind.NOT_STARTED: RolloutFate.REPLACED,
    OutcomeKind.ENGINE_FAILED: RolloutFate.REPLACED,
    OutcomeKind.HARNESS_FAILED: RolloutFate.REPLACED,
}
"""None if `OnFailure` decides."""


def fate_of(kind: OutcomeKind, on_failure: OnFailure, *, is_usable: bool = True) -> RolloutFate:
    """Return the fate of a rollout. `is_usable`: it has a finite reward, and its encoder did not fail."""
    fate = FATES[kind]
    if fate is None:
        return RolloutFate.COUNTED if on_failure is OnFailure.COUNT else RolloutFate.REPLACED
    # A missing reward is never a zero.
    return RolloutFate.REPLACED if fate is RolloutFate.KEPT and not is_usable else fate
