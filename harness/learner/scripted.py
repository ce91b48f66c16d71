"""A learner without a model, for tests and for measuring what stands around one.

Its weights are a digest of everything that it was trained on, in order: two runs with equal weights were trained on the
same packs in the same steps. It needs no torch.
"""

import json
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

from harness.errors import LearnerError
from harness.learner.folders import write_folder
from harness.learner.learner import LossSums, StepReport
from harness.samples.packs import Pack

_STATE = "scripted_learner.json"


class ScriptedLearner:
    """A `Learner` of one rank that takes as long as it is told to."""

    def __init__(
        self, seconds_per_pack: float = 0.0, *, sleep: Callable[[float], None] = time.sleep, start: str = ""
    ) -> None:
        """`sleep` is called with `seconds_per_pack` for each pack; `start` are the first weights, any text."""
        self.weights = start
        """32 hex digits once a step has been finished."""
        self.packs: list[str] = []
        """Digests of the packs of the step that is being accumulated."""
        self._step = 0
        self._seconds_per_pack = seconds_per_pack
        self._sleep = sleep
        self._sums = LossSums()

    @property
    def step(self) -> int:
        """How many steps it has finished."""
        return self._step

    def accumulate(self, pack: Pack) -> LossSums:
        """Note the digest of `pack`."""
        self._sleep(self._seconds_per_pack)
        self.packs.append(pack.digest())
        sums = LossSums(trained_tokens=float(pack.loss_mask.sum()))
        self._sums += sums
        return sums

    def finish_step(self, normalizer: float) -> StepReport:
        """Move the weights on by the digests of the step, unless no token of them was to be trained."""
        packs, sums = self.packs, self._sums
        self.discard_step()
        if sums.trained_tokens:
            if not 0 < normalizer < float("inf"):
                raise LearnerError(f"the normalizer of a step is a positive number, this one is {normalizer}")
            told = json.dumps([self.weights, packs, float(normalizer)])
            self.weights = blake2b(told.encode(), digest_size=16).hexdigest()
        self._step += 1
        return StepReport(self._step, len(packs), sums, normalizer, gradient_norm=0.0, learning_rate=0.0)

    def discard_step(self) -> None:
        """Forget the digests of the step."""
        self.packs, self._sums = [], LossSums()

    def save(self, folder: Path) -> None:
        """The digest; no engine but the scripted one loads this folder."""
        self.save_state(folder)

    def save_state(self, folder: Path) -> None:
        """Digest and number of steps."""
        with write_folder(folder) as unfinished:
            (unfinished / _STATE).write_text(json.dumps({"step": self._step, "weights": self.weights}))

    def load_state(self, folder: Path) -> None:
        """Raises `LearnerError` when `folder` has no state of a scripted learner."""
        try:
            state = json.loads((folder / _STATE).read_text())
            self._step, self.weights = int(state["step"]), str(state["weights"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LearnerError(f"{folder} has no state of a scripted learner: {error}") from error
