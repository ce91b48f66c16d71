"""A stand-in of areal 1.0.4: the names, signatures and checks that an adapter meets, and no more.

Written from facts; `tests/conformance/adapters/test_released_trainers.py` holds it, and the wheel, against a table.
"""

import asyncio
from typing import ClassVar

from areal.infra import workflow_context as workflow_context
from areal.infra.engines import CountingEngine
from areal.infra.episodes import resolve_workflow, run_episode
from areal.infra.utils.concurrent import run_cleanups

__version__ = "1.0.4"


class PPOTrainer:
    """Runs the episodes of its data, one after the other, and keeps their trajectories."""

    trajectories: ClassVar[list] = []

    def __init__(self, config, train_dataset=None, valid_dataset=None):
        self.config, self.data = config, train_dataset

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def train(  # noqa: PLR0917  # as AReaL has it
        self,
        workflow=None,
        eval_workflow=None,
        workflow_kwargs=None,
        eval_workflow_kwargs=None,
        dynamic_filter_fn=None,
        total_epochs=None,
    ):
        """Every episode that is accepted is a trajectory."""

        async def run():
            try:
                resolved = resolve_workflow(workflow, workflow_kwargs)
                self.trajectories[:] = [await run_episode(resolved, CountingEngine(), row) for row in self.data]
            finally:
                await run_cleanups()

        asyncio.run(run())
