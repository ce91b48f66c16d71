"""What a learner is told before its first step: which loss, and how the weights move. Plain values, without torch."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import LearnerError


class LossKind(StrEnum):
    """The loss of a sampled token. Tokens that an encoder appended are trained by cross-entropy in all of them."""

    CROSS_ENTROPY = "cross_entropy"
    """Minus the logprob, weighed by the advantage."""
    PPO = "ppo"
    """The clipped ratio to the behavior policy."""
    GRPO = "grpo"
    """The same, with the advantage of a rollout in its group."""
    DECOUPLED_PPO = "decoupled_ppo"
    """The clipped ratio to the proximal policy, weighed by how much more likely that one made the token."""


@dataclass(frozen=True, slots=True)
class LossSettings:
    """A loss and its bounds. Raises `LearnerError` for bounds that are none."""

    kind: LossKind = LossKind.GRPO
    clip_low: float = 0.2
    """The ratio counts down to 1 minus this."""
    clip_high: float = 0.2
    """The ratio counts up to 1 plus this."""
    weight_cap: float = 2.0
    """The most that a token weighs in decoupled PPO."""

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
    """The normalized gradient is scaled down to this Euclidean norm; `math.inf` never scales it."""

    def __post_init__(self) -> None:
        if not (self.learning_rate >= 0 and 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and self.clip_norm > 0):
            raise LearnerError(
                "expected a learning_rate of at least 0, beta1 and beta2 from 0 to below 1, clip_norm above 0;"
                f" got {self.learning_rate}, {self.beta1}, {self.beta2}, {self.clip_norm}"
            )


Schedule = Callable[[int], float]
"""From the number of finished steps to the factor of the learning rate in the next one."""


def constant(step: int) -> float:  # noqa: ARG001
    """The same learning rate in every step."""
    return 1.0
