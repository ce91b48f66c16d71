"""Trains a scenario on data that is spoiled in one of two ways, to see what exact tokens and cut turns are worth.

    python bench/spoiled_training.py retokenized scenarios/train_tool_game --steps 150 --seed 1 --out runs/retokenized

`retokenized`: the ids of each answer are those that the tokenizer makes of its text, as in a trainer that gets
messages. What nobody sampled has no behavior logprob: a turn that changes is trained by its advantage alone.

`uncut`: three turns in ten were aborted at a random token and asked again, and what had been sampled until then stays
in front of the whole answer and is trained with it, as in a trainer that glues together what an engine sent. The
beginning of the answer itself stands for that of the aborted one.

Rollouts, packs and books are those of `harness train`: only what the learner sees is another thing.
"""

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from harness.learner.learner import Learner, LossSums, StepReport
from harness.samples.packs import Pack
from harness.samples.segments import COLUMNS, Segment
from harness.samples.versions import NOT_SAMPLED
from harness.suite.record.config import Overrides
from harness.suite.run.interrupts import Interrupts
from harness.suite.run.open_run import begin_run
from harness.suite.training.train_run import TrainRun
from harness.telemetry.logging import configure_logging

ABORTED = 0.3
"""Share of the turns."""

Spoil = Callable[[Segment], Segment]


class SpoiledLearner:
    """A learner that gets its packs with every segment spoiled."""

    def __init__(self, learner: Learner, spoil: Spoil) -> None:
        self._learner, self._spoil = learner, spoil

    @property
    def step(self) -> int:
        return self._learner.step

    def accumulate(self, pack: Pack) -> LossSums:
        return self._learner.accumulate(Pack.of([self._spoil(each) for each in pack.segments()], pack.numbers.tolist()))

    def finish_step(self, normalizer: float) -> StepReport:
        return self._learner.finish_step(normalizer)

    def discard_step(self) -> None:
        self._learner.discard_step()

    def save(self, folder: Path) -> None:
        self._learner.save(folder)

    def save_state(self, folder: Path) -> None:
        self._learner.save_state(folder)

    def load_state(self, folder: Path) -> None:
        self._learner.load_state(folder)


class Retokenized:
    """Answers as the tokenizer writes their text."""

    def __init__(self, tokenizer: Tokenizer, counts: Counter[str]) -> None:
        self._tokenizer, self._counts = tokenizer, counts

    def __call__(self, segment: Segment) -> Segment:
        parts = [self._spoil(part) if part.trained else part.columns for part in parts_of(segment)]
        return join(parts)

    def _spoil(self, part: "Part") -> "Columns":
        sampled = part.columns["ids"].tolist()
        ids = self._tokenizer.encode(self._tokenizer.decode(sampled, skip_special_tokens=False)).ids
        self._counts.update(turns=1, tokens=len(sampled))
        if ids == sampled:
            return part.columns
        self._counts.update(changed_turns=1, tokens_of_changed_turns=len(sampled))
        return {
            "ids": np.asarray(ids, np.int32),
            "loss_mask": np.ones(len(ids), np.uint8),
            "advantages": np.full(len(ids), part.columns["advantages"][0], np.float32),
            "behavior_logprobs": np.zeros(len(ids), np.float32),
            "proximal_logprobs": np.zeros(len(ids), np.float32),
            "behavior_versions": np.full(len(ids), NOT_SAMPLED, np.int32),
            "proximal_versions": np.full(len(ids), NOT_SAMPLED, np.int32),
        }


class Uncut:
    """Answers with the beginning of an aborted one in front, now and then."""

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self._chance, self._counts = random.Random(seed), counts

    def __call__(self, segment: Segment) -> Segment:
        parts: list[Columns] = []
        for part in parts_of(segment):
            size = part.columns["ids"].size
            if part.trained:
                self._counts.update(turns=1, tokens=size)
            if part.trained and size > 1 and self._chance.random() < ABORTED:
                cut = self._chance.randrange(1, size)
                self._counts.update(changed_turns=1, tokens_in_front=cut)
                parts.append({name: column[:cut] for name, column in part.columns.items()})
            parts.append(part.columns)
        return join(parts)


Columns = dict[str, np.ndarray]


class Part:
    """Tokens of a segment, one behind the other, of which all are trained or none."""

    def __init__(self, segment: Segment, start: int, stop: int) -> None:
        self.columns: Columns = {name: getattr(segment, name)[start:stop] for name in COLUMNS}
        self.trained = bool(segment.loss_mask[start])


def parts_of(segment: Segment) -> Iterator[Part]:
    """The answers of `segment`, and what stands between them."""
    borders = [0, *(np.flatnonzero(np.diff(segment.loss_mask)) + 1).tolist(), len(segment)]
    for start, stop in pairwise(borders):
        yield Part(segment, start, stop)


def join(parts: list[Columns]) -> Segment:
    """The segment that `parts` make."""
    return Segment(**{name: np.concatenate([part[name] for part in parts]) for name in COLUMNS})


def main() -> None:
    """Train, and say how much was spoiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("how", choices=["retokenized", "uncut"])
    parser.add_argument("scenario")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    opened = begin_run(given.scenario, Overrides(seed=given.seed), given.out, trains=True)
    counts: Counter[str] = Counter()
    configure_logging("error")

    def around(learner: Learner) -> Learner:
        if given.how == "uncut":
            return SpoiledLearner(learner, Uncut(given.seed, counts))
        folder = given.out / "warm"
        learner.save(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return SpoiledLearner(learner, Retokenized(tokenizer, counts))

    async def execute() -> str:
        interrupts = Interrupts()
        with interrupts.from_signals():
            return (await TrainRun(opened, given.steps, print, interrupts, around_learner=around).execute()).text

    print(asyncio.run(execute()))
    print(dict(counts))


if __name__ == "__main__":
    main()
