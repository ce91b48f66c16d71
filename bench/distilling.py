"""Steps in which `harness train` distills the rule of the tool game: the divergence from the teacher must fall below a
tenth.

    python -m bench.distilling --seeds 1 2 3

The student is the model of `train_tool_game`, the teacher a scripted engine that follows the marks. No reward is given.
Exits 1 if a seed does not get there.
"""

import argparse
import os
import shutil
import sys
import tomllib
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import monotonic

import tomli_w

from bench.turn_credit import run_training

SCENARIO = Path(__file__).parents[1] / "scenarios" / "train_tool_game"
RULE = {
    "after": r"marks(?: in the hall)? lead to the ([a-z ]+)\.<\|im_end\|>\n<\|im_start\|>assistant\n",
    "say": ['<tool_call>\n{"name": "go", "arguments": {"room": "', r"\1", '"}}\n</tool_call>'],
}
NO_REWARD = "def score(session, result, metadata):\n    return 0.0\n"
WINDOW = 10  # steps in a mean, because a step samples few tokens


def distill(directory: Path, seed: int, steps: int) -> list[float]:
    """Return the divergence of each step, in nats per token."""
    folder, run = directory / "train_tool_game", directory / "run"
    shutil.copytree(SCENARIO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    scenario = tomllib.loads((folder / "scenario.toml").read_text())
    scenario["teachers"] = {"rule": {"engine": "scripted=../rule.toml", "top_k": 5}}
    scenario["samples_per_prompt"] = 1  # no groups without rewards: a student learns more from other games
    scenario["train"] |= {"advantage": "reward", "teachers": {"rule": 1.0}, "rollouts_per_step": 16}
    (folder / "scenario.toml").write_text(tomli_w.dumps(scenario))
    (directory / "rule.toml").write_text(tomli_w.dumps({"rule": RULE}))
    (folder / "check.py").write_text(NO_REWARD)
    return run_training(folder, run, "rollout/teacher_gap/rule", "--steps", steps, "--seed", seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    lasts = []
    for seed in given.seeds:
        with TemporaryDirectory() as directory:
            began, before = monotonic(), sum(os.times()[2:4])
            gaps = distill(Path(directory), seed, given.steps)
        lasts.append(fmean(gaps[-WINDOW:]) / gaps[0])
        means = " ".join(f"{fmean(gaps[at : at + WINDOW]):.3f}" for at in range(0, len(gaps), WINDOW))
        took = f"{monotonic() - began:.0f} s, {sum(os.times()[2:4]) - before:.0f} s of processors"
        print(f"seed {seed}: {means}, at last {lasts[-1]:.3f} of the first; {took}", flush=True)
    sys.exit(max(lasts) >= 0.1)


if __name__ == "__main__":
    main()
