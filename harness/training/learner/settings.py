"""Learner settings, without torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.errors import LearnerError


class LossKind(StrEnum):
    """Loss of sampled tokens; others always use cross-entropy."""

    CROSS_ENTROPY = "cross_entropy"
    """Negative logprob times advantage."""
    PPO = "ppo"
    """Clipped ratio to the behavior policy."""
    GRPO = "grpo"
    """PPO with group advantages."""
    DECOUPLED_PPO = "decoupled_ppo"
    """Clipped ratio to the proximal policy, weighted."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss and its bounds. Raises `LearnerError`."""

    kind: LossKind = LossKind.GRPO
    clip_low: float = 0.2
    """Lowest ratio: 1 minus this."""
    clip_high: float = 0.2
    """Highest ratio: 1 plus this."""
    weight_cap: float = 2.0
    """For decoupled PPO."""
    teachers: Mapping[str, float] = field(default_factory=dict)
    """Weight of the divergence from each teacher with most likely tokens, added to the loss."""

    def __post_init__(self) -> None:
        if not (0 <= self.clip_low <= 1 and self.clip_high >= 0 and self.weight_cap > 0):
            raise LearnerError(
                "expected clip_low from 0 to 1, clip_high of at least 0 and weight_cap above 0;"
                f" got {self.clip_low}, {self.clip_high}, {self.weight_cap}"
            )


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW, one update per step."""

    learning_rate: float = 2e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """Largest Euclidean norm after normalization, or `math.inf`."""

    def __post_init__(self) -> None:
        if not (self.learning_rate >= 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.clip_norm > 0):
            raise LearnerError(
                "expected a learning_rate of at least 0, beta1 and beta2 from 0 to below 1, clip_norm above 0;"
                f" got {self.learning_rate}, {self.beta1}, {self.beta2}, {self.clip_norm}"
            )


Schedule = Callable[[int], float]
"""From finished steps to a learning rate factor."""


def constant(step: int) -> float:  # noqa: ARG001
    return 1.0
