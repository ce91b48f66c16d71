"""Scripted learner: no model, no torch. Its weights are a digest of all packs and steps so far, in order."""

import json
from hashlib import blake2b
from pathlib import Path

from harness.errors import LearnerError
from harness.samples.packs import Pack
from harness.training.learner.folders import write_folder
from harness.training.learner.learner import LossSums, StepReport

_STATE = "scripted_learner.json"


class ScriptedLearner:
    """`Learner` of one rank."""

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
