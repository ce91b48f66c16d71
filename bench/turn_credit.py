"""Steps that the tool game takes to a mean reward, with each estimator of credit: are rewards of turns worth anything?

    python bench/turn_credit.py --seeds 1 2 3 --steps 80 --rollouts 8

Plays `harness train` on copies of `train_tool_game` that differ in `train.advantage` and its discount or forks alone,
one after the other. A run has reached a threshold at the first step at which the mean reward of its last ten steps is
as high.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import tomli_w

SCENARIO = Path(__file__).parents[1] / "scenarios" / "train_tool_game"
ESTIMATORS = ("rollout", "turn", "return_to_go:1", "return_to_go:0.5", "return_to_go:0", "value:4")
THRESHOLDS = (0.5, 0.7, 0.8)
WINDOW = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--rollouts", type=int, default=8, help="Of a step, in groups of eight.")
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS))
    given = parser.parse_args()
    for seed in given.seeds:
        for estimator in given.estimators:
            with TemporaryDirectory() as directory:
                rewards = train(Path(directory), estimator, seed, given.steps, given.rollouts)
            means = [fmean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)]
            reached = {
                goal: next((end for end, mean in enumerate(means, WINDOW) if mean >= goal), None) for goal in THRESHOLDS
            }
            tens = " ".join(f"{mean:.2f}" for mean in means[::WINDOW])
            words = ", ".join(f"{goal:g} at {step or f'none of {given.steps}'}" for goal, step in reached.items())
            print(f"seed {seed} {estimator}: {words}; per ten steps {tens}", flush=True)


def train(directory: Path, estimator: str, seed: int, steps: int, rollouts: int) -> list[float]:
    folder, run = directory / "train_tool_game", directory / "run"
    shutil.copytree(SCENARIO, folder, ignore=shutil.ignore_patterns("__pycache__"))
    scenario = tomllib.loads((folder / "scenario.toml").read_text())
    name, _, number = estimator.partition(":")
    of_value = {"value_forks": int(number)} if name == "value" else {"discount": float(number or 1)}
    scenario["train"] |= {"advantage": name, "rollouts_per_step": rollouts, **of_value}
    (folder / "scenario.toml").write_text(tomli_w.dumps(scenario))
    return run_training(folder, run, "rollout/reward_mean", "--steps", steps, "--seed", seed)


def run_training(scenario: Path, out: Path, figure: str, *options: object) -> list[float]:
    """The figure of each step of `harness train`. Exits if it fails."""
    command = (sys.executable, "-m", "harness", "train", scenario, "--out", out, *options)
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    return [float(json.loads(line)[figure]) for line in (out / "telemetry.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
