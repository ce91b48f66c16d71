"""Two ranks, of which rank 1 is killed before the end of a step: `python -m tests.learner.lost_rank_program RANK`.

Rank 0 writes what it is told into `told.txt`, in a folder that the ranks share.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness.errors import LearnerError
from harness.learner.settings import LossKind, LossSettings, OptimizerSettings
from harness.learner.torch_learner import TorchLearner
from tests.learner.tiny_models import in_packs, some_segments, tiny_model

DEADLINE_S = 120.0

if __name__ == "__main__":
    rank = int(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path.cwd() / 'ranks'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=DEADLINE_S),
    )
    model = tiny_model()
    pack = in_packs(some_segments(model), 1)[0]
    learner = TorchLearner(model, LossSettings(LossKind.PPO), OptimizerSettings())
    learner.accumulate(pack)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        learner.finish_step(1)
    except LearnerError as error:
        is_same = all(map(torch.equal, before, model.parameters()))
        Path("told.txt").write_text(f"{learner.step} {is_same} {error}")
    os._exit(0)  # a process group without its other rank does not end in good order
