"""Learner protocol: packs in, one weight update per step out. Needs no torch.

Ranks call `accumulate` once per pack, possibly never, and `finish_step` once per step. Gradients travel only there, so
no rank waits for another's packs. Calls never overlap, but may come from different threads.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from harness.samples.packs import Pack


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over trained tokens."""

    loss: float = 0.0  # not normalized
    trained_tokens: float = 0.0  # with loss mask 1
    compared_tokens: float = 0.0  # sampled, with a ratio
    ratio: float = 0.0
    """To the behavior policy, or the proximal one in decoupled PPO."""
    kl: float = 0.0
    """Estimated as ratio - 1 - ln(ratio)."""
    clipped_tokens: float = 0.0
    """Without a gradient."""
    weight: float = 0.0
    """Proximal over behavior probability, capped; else 1."""
    capped_tokens: float = 0.0

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class StepReport:
    """One update, the same on every rank."""

    step: int
    packs: int
    sums: LossSums
    normalizer: float
    gradient_norm: float
    """Euclidean, normalized, before clipping."""
    learning_rate: float

    def telemetry(self) -> Mapping[str, float]:
        compared = self.sums.compared_tokens or 1.0
        return {
            "train/loss": self.sums.loss / (self.normalizer or 1.0),
            "train/gradient_norm": self.gradient_norm,
            "train/learning_rate": self.learning_rate,
            "train/trained_tokens": self.sums.trained_tokens,
            "train/ratio_mean": self.sums.ratio / compared,
            "train/kl": self.sums.kl / compared,
            "train/clipped_share": self.sums.clipped_tokens / compared,
            "train/weight_mean": self.sums.weight / compared,
            "train/capped_share": self.sums.capped_tokens / compared,
        }


# The normalizer (trained tokens, sequences or rollouts of all ranks) is known only when the last rollout ends. So a
# learner sums gradients, and scales them once, before clipping and the update.
class Learner(Protocol):
    @property
    def step(self) -> int:
        """Finished steps, restored by `load_state`."""

    def accumulate(self, pack: Pack) -> LossSums:
        """Add the gradient of `pack` on this rank. Raises `LearnerError`; discard the step then."""

    def finish_step(self, normalizer: float) -> StepReport:
        """Update the weights by the summed gradient, divided by the sum of all ranks' `normalizer` (0 without packs).

        Waits for all ranks. A step without trained tokens counts, without an update. Raises `LearnerError`, with
        weights unchanged and the step discarded, if the sum is not positive, the gradient is not finite, or a rank is
        missing.
        """

    def discard_step(self) -> None:
        """Drop gradients since the last step."""

    def save(self, folder: Path) -> None:
        """Write a model folder for engines (safetensors), on one rank; new, and complete. Raises `LearnerError`."""

    def save_state(self, folder: Path) -> None:
        """Write all training state, between steps. See `save`."""

    def load_state(self, folder: Path) -> None:
        """Continue from `save_state` with identical numbers, on every rank. Raises `LearnerError`, with no change."""
