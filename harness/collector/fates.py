"""What becomes of a rollout in a step: one table over the kinds of outcome.

A failure of the engine or of the harness says nothing about the policy, so another attempt takes its place. A failure
of the agent may be the policy's own doing; whether it counts as one of the step's rollouts is the trainer's choice.
"""

from collections.abc import Mapping
from enum import StrEnum

from harness.samples.rollout import OutcomeKind


class RolloutFate(StrEnum):
    """What becomes of a rollout."""

    KEPT = "kept"
    """It fills its place in the step."""
    COUNTED = "counted"
    """It fills its place, and nothing of it is trained."""
    REPLACED = "replaced"
    """Another attempt takes its place, as long as there is one."""


class OnFailure(StrEnum):
    """What becomes of a rollout that its agent failed."""

    REPLACE = "replace"
    COUNT = "count"


FATES: Mapping[OutcomeKind, RolloutFate | None] = {
    OutcomeKind.FINISHED: RolloutFate.KEPT,
    OutcomeKind.LIMITED: RolloutFate.KEPT,
    OutcomeKind.NO_MODEL_CALL: None,
    OutcomeKind.CRASHED: None,
    OutcomeKind.GARBAGE: None,
    OutcomeKind.TIMED_OUT: None,
    OutcomeKind.DRAINED: RolloutFate.REPLACED,
    OutcomeKind.NOT_STARTED: RolloutFate.REPLACED,
    OutcomeKind.ENGINE_FAILED: RolloutFate.REPLACED,
    OutcomeKind.HARNESS_FAILED: RolloutFate.REPLACED,
}
"""None where `OnFailure` decides. A drained rollout was ended by others: those that a step ends never come here."""


def fate_of(kind: OutcomeKind, on_failure: OnFailure, *, is_usable: bool = True) -> RolloutFate:
    """The fate of a rollout that ended as `kind`.

    `is_usable`: it has a finite reward, and its encoder did not raise. One that ended well and is not is replaced: a
    reward that is missing is never a zero.
    """
    fate = FATES[kind]
    if fate is None:
        return RolloutFate.COUNTED if on_failure is OnFailure.COUNT else RolloutFate.REPLACED
    return RolloutFate.REPLACED if fate is RolloutFate.KEPT and not is_usable else fate
