"""Learners without torch: the protocol, settings, folders, and a scripted one.

Packs in, one weight update per step out. Ranks call `accumulate` once per pack, possibly never, and `finish_step` once
per step. Gradients travel only there, so no rank waits for another's packs. Calls never overlap, but may come from
different threads.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from harness.errors import LearnerError
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


@contextmanager
def write_folder(folder: Path, errors: tuple[type[Exception], ...] = ()) -> Iterator[Path]:
    """Yield an empty folder. If the block succeeds, sync it and rename it to `folder`.

    Raises `LearnerError`, also for `errors` of a writer that has its own for a full disk.
    """
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    if folder.exists():
        raise LearnerError(f"{folder} exists already; name a new folder, or remove it")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process
        unfinished.mkdir(parents=True)
        yield unfinished
        for path in (*unfinished.rglob("*"), unfinished):
            _sync(path)
        unfinished.rename(folder)
        _sync(folder.parent)  # so that the name survives a power cut
    except OSError as error:
        raise LearnerError(f"{folder} cannot be written: {error}; free space or name another folder") from error
    except errors as error:
        raise LearnerError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_STATE = "scripted_learner.json"


class ScriptedLearner:
    """`Learner` of one rank, without a model. Its weights are a digest of all packs and steps so far, in order."""

    def __init__(self, *, start: str = "") -> None:
        self.weights = start
        """32 hex digits after a step."""
        self.packs: list[str] = []
        self._step = 0
        self._sums = LossSums()

    @property
    def step(self) -> int:
        return self._step

    def accumulate(self, pack: Pack) -> LossSums:
        self.packs.append(pack.digest())
        sums = LossSums(trained_tokens=float(pack.loss_mask.sum()))
        self._sums += sums
        return sums

    def finish_step(self, normalizer: float) -> StepReport:
        """Update the digest, if a token is trained."""
        packs, sums = self.packs, self._sums
        self.discard_step()
        if sums.trained_tokens:
            if not 0 < normalizer < float("inf"):
                raise LearnerError(f"normalizer: expected a positive number, got {normalizer}")
            told = json.dumps([self.weights, packs, float(normalizer)])
            self.weights = blake2b(told.encode(), digest_size=16).hexdigest()
        self._step += 1
        return StepReport(self._step, len(packs), sums, normalizer, gradient_norm=0.0, learning_rate=0.0)

    def discard_step(self) -> None:
        self.packs, self._sums = [], LossSums()

    def save(self, folder: Path) -> None:
        """Save for scripted engines only."""
        self.save_state(folder)

    def save_state(self, folder: Path) -> None:
        with write_folder(folder) as unfinished:
            (unfinished / _STATE).write_text(json.dumps({"step": self._step, "weights": self.weights}))

    def load_state(self, folder: Path) -> None:
        """Load a scripted state. Raises `LearnerError`."""
        try:
            state = json.loads((folder / _STATE).read_text())
            self._step, self.weights = int(state["step"]), str(state["weights"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LearnerError(f"{folder} has no state of a scripted learner: {error}") from error
