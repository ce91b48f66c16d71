"""What a learner is: packs in, one update of the weights per step out.

A step is any number of packs, `accumulate` once for each, and `finish_step` once. Losses are sums over tokens. They are
divided by the normalizer: the trained tokens, the sequences or the rollouts of the step, of all ranks. It is known only
when the last rollout has ended. So a learner keeps gradients as sums, and scales them once, before it clips them and
updates the weights.

With several ranks each one calls `accumulate` as often as it has packs, also never, and `finish_step` once per step.
Gradients travel in `finish_step` and nowhere else, so no rank waits for another one's packs.

One call runs at a time; each may come from another thread. Nothing here needs torch: a learner of one's own is any
class with these methods.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Protocol

from harness.samples.packs import Pack


@dataclass(frozen=True, slots=True)
class LossSums:
    """What a loss has met, as sums over trained tokens: of one pack, or of a whole step."""

    loss: float = 0.0
    """Not normalized."""
    trained_tokens: float = 0.0
    """Tokens with loss mask 1."""
    compared_tokens: float = 0.0
    """Those of them that have a ratio: the loss is not cross-entropy, and a policy had sampled them."""
    ratio: float = 0.0
    """Probability under the policy that is trained over that under the older one: the behavior policy, in decoupled PPO
    the proximal policy."""
    kl: float = 0.0
    """Divergence of the policy that is trained from the older one, estimated as ratio - 1 - ln(ratio)."""
    clipped_tokens: float = 0.0
    """Tokens without a gradient, because their ratio had left the clip range in the direction of their advantage."""
    weight: float = 0.0
    """Behavior weight: probability under the proximal policy over that under the behavior policy, at most the cap; 1 in
    losses without one."""
    capped_tokens: float = 0.0
    """Tokens whose behavior weight was above the cap."""

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class StepReport:
    """One update of the weights. The same on every rank."""

    step: int
    """How many steps this learner has finished, with this one."""
    packs: int
    """Over all ranks."""
    sums: LossSums
    """Over all ranks."""
    normalizer: float
    """Over all ranks."""
    gradient_norm: float
    """Euclidean, of the normalized gradient before it was clipped."""
    learning_rate: float
    """That of this update."""

    def telemetry(self) -> Mapping[str, float]:
        """Figures to log, by key; keys and their order are fixed. A mean over no token is 0."""
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


class Learner(Protocol):
    """Trains a model on packs."""

    @property
    def step(self) -> int:
        """How many steps it has finished; goes on counting after `load_state`."""
        ...

    def accumulate(self, pack: Pack) -> LossSums:
        """One forward and backward pass: adds the gradient of `pack` to that of the step, on this rank only.

        Raises `LearnerError` when the model cannot take the pack; the step is to be discarded then.
        """
        ...

    def finish_step(self, normalizer: float) -> StepReport:
        """Update the weights once, by the gradient of all packs of all ranks divided by the sum of their normalizers.

        `normalizer` is this rank's part of it: its trained tokens, its sequences or its rollouts; 0 where it has none.
        Called once per step on every rank, also on one without a pack; it waits for the others. A step in which no rank
        had a token to train changes no weight, and counts.

        Raises `LearnerError`, and changes no weight, when the sum of the normalizers is not a positive number or the
        gradient is not finite, or another rank does not come; the step is over then, and nothing of it is left.
        """
        ...

    def discard_step(self) -> None:
        """Forget what has been accumulated since the last step: it failed, and half a step is not trained."""
        ...

    def save(self, folder: Path) -> None:
        """Write the weights as a model folder that engines load (safetensors). On one rank.

        `folder` does not exist yet and is there only when it is whole. Raises `LearnerError` when it cannot be written.
        """
        ...

    def save_state(self, folder: Path) -> None:
        """Write all that the next step depends on: weights, optimizer, number of steps. On one rank.

        Between two steps only; otherwise like `save`.
        """
        ...

    def load_state(self, folder: Path) -> None:
        """Go on from what `save_state` wrote, with the same numbers that it would have gone on with. On every rank.

        Raises `LearnerError`, and changes nothing, when there is none, or one of another model or optimizer.
        """
        ...
