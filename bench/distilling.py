"""Steps in which `harness train` distills a known rule: the divergence from the teacher must fall below a tenth.

    python -m bench.distilling --seeds 1 2 3

The teacher says the rule whatever was said before; the student is a random model of the same size. No reward is given.
Exits 1 if a seed does not get there.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import numpy as np
import tomli_w

from bench.turn_credit import run_training
from harness.samples.packs import Pack
from harness.samples.segments import Segment
from harness.training.learner.settings import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.torch_learner import TorchLearner
from tests.builders import EOS, toy_template
from tests.toy_model import write_toy_weights
from tests.trained_scenario import write_trained_scenario

RULE = "Guess 7."
PROMPT = "Say something."
WINDOW = 5  # steps in a mean, because a step samples few tokens


def teach_rule(folder: Path, seed: int) -> Path:
    """A model that says the rule; random tokens in the place of its earlier ones do not confuse it."""
    learner = TorchLearner.open(
        write_toy_weights(folder / "random", seed), LossSettings(LossKind.CROSS_ENTROPY), OptimizerSettings(3e-3)
    )
    random = np.random.default_rng(seed)
    prompt = toy_template().render_ids([{"role": "user", "content": PROMPT}], [])
    rule = [*toy_template().tokenizer.encode(RULE), EOS]
    for _ in range(60):
        said = [
            np.where(random.random(end) < 0.7, random.integers(0, 259, end), rule[:end]) for end in range(len(rule))
        ]
        texts = [[*prompt, *each.tolist(), rule[end]] for end, each in enumerate(said)]
        segments = [Segment.of_tokens(ids, [0] * (len(ids) - 1) + [1]) for ids in texts]
        learner.accumulate(Pack.of(segments, range(len(segments))))
        learner.finish_step(len(segments))
    learner.save(folder / "teacher")
    return folder / "teacher"


def distill(folder: Path, seed: int, steps: int) -> list[float]:
    """The divergence of each step, in nats per token."""
    train: dict[str, Any] = {"rollouts_per_step": 32, "advantage": "reward", "teachers": {"rule": 1.0}}
    scenario = {
        "schema_version": 1,
        "name": "distilling",
        "description": "Learn a rule from a teacher.",
        "engine": {"name": "local", "model": str(write_toy_weights(folder / "student", seed + 100))},
        "teachers": {"rule": {"engine": f"local={teach_rule(folder, seed)}", "top_k": 20}},
        "limits": {"tokens_per_turn": 12},
        "prompts": [{"metadata": {"turns": 1}}],
        "agent": {"function": "play.py:run", "deadline_s": 60.0},
        "samples_per_prompt": 32,
        "concurrency": 16,
        "train": {**train, "packing": {"length": 512, "lookahead": 1}, "optimizer": {"learning_rate": 5e-3}},
    }
    directory = write_trained_scenario(folder / "scenario")
    (directory / "scenario.toml").write_text(tomli_w.dumps(scenario))
    (directory / "instruction.md").write_text(PROMPT)
    (directory / "check.py").write_text("def score(session, result, metadata):\n    return 0.0\n")
    return run_training(directory, folder / "run", "rollout/teacher_gap/rule", "--steps", steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    lasts = []
    for seed in given.seeds:
        with TemporaryDirectory() as directory:
            began = monotonic()
            gaps = distill(Path(directory), seed, given.steps)
        lasts.append(fmean(gaps[-WINDOW:]) / gaps[0])
        means = " ".join(f"{fmean(gaps[at : at + WINDOW]):.2f}" for at in range(0, len(gaps), WINDOW))
        print(f"seed {seed}: {means}, at last {lasts[-1]:.3f} of the first; {monotonic() - began:.0f} s", flush=True)
    sys.exit(max(lasts) >= 0.1)


if __name__ == "__main__":
    main()
