"""One of two ranks: `python -m tests.learner.rank_program RANK [[PACK, ...], ...]` in a folder that the ranks share.

Each list has the numbers of the rank's packs, of six, and is a run of its own: its weights go to `RUN-RANK.npz`. Rank 1
begins with other weights, and with its packs of a step only after rank 0 is through with all of its own: ranks that
waited for each other's packs would never get there.

Behind the last run rank 1 is killed before the end of one more step, and rank 0 writes what it is told into `told.txt`.
"""

import json
import os
import signal
import sys
import time
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from harness.errors import LearnerError
from harness.training.learner.learner import LossKind, LossSettings, OptimizerSettings
from harness.training.learner.torch_learner import TorchLearner
from tests.learner.tiny_models import in_packs, some_segments, tiny_model

RANKS = 2
BUCKET_BYTES = 12_000
DEADLINE_S = 120.0


def wait_for(path: Path) -> None:
    """Until it is there."""
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{path} did not come")
        time.sleep(0.01)


def train(rank: int, numbers: list[int], folder: Path) -> dict[str, np.ndarray]:
    """Two steps on the packs of these numbers; what they came to."""
    packs = in_packs(some_segments(tiny_model()), 6)
    model = tiny_model(seed=rank)
    settings = OptimizerSettings(learning_rate=0.01)
    learner = TorchLearner(model, LossSettings(LossKind.DECOUPLED_PPO), settings, bucket_bytes=BUCKET_BYTES)
    figures, reductions = [], 0
    for step in range(2):
        if rank:
            wait_for(folder / f"through-{step}")
        tokens = sum(learner.accumulate(packs[number]).trained_tokens for number in numbers)
        (folder / f"through-{step}").touch()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            report = learner.finish_step(tokens)
        reductions += sum(event.count for event in profiled.key_averages() if event.key == "gloo:all_reduce")
        figures += [report.normalizer, report.packs, report.gradient_norm, *astuple(report.sums)]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    sizes = [parameter.nbytes for parameter in model.parameters()]
    return {
        "weights": weights.numpy(),
        "figures": np.array(figures),
        "reductions": np.array(reductions),
        "parameter_bytes": np.array(sizes),
    }


def lose_rank(rank: int) -> str:
    """What rank 0 is told where rank 1 is killed in a step: steps, whether the weights are as before, the error."""
    model = tiny_model()
    [pack] = in_packs(some_segments(model), 1)
    learner = TorchLearner(model, LossSettings(LossKind.PPO), OptimizerSettings())
    learner.accumulate(pack)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        learner.finish_step(1)
    except LearnerError as error:
        return f"{learner.step} {all(map(torch.equal, before, model.parameters()))} {error}"
    return "nothing"


if __name__ == "__main__":
    rank, runs, folder = int(sys.argv[1]), json.loads(sys.argv[2]), Path.cwd()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'ranks'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    for run, numbers in enumerate(runs):
        (folder / f"{run}").mkdir(exist_ok=True)
        np.savez(folder / f"{run}-{rank}.npz", **train(rank, numbers, folder / f"{run}"))
    Path("told.txt").write_text(lose_rank(rank))
    os._exit(0)  # a process group without its other rank does not end in good order
