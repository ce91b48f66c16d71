"""Publish the learner's weights to engines under live sessions."""

import asyncio

import msgspec

from harness.machine.deadlines import to_the_end
from harness.rollouts.client.session_server import SessionServerClient
from harness.rollouts.control.weights import WeightUpdater
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import OwnServices
from harness.suite.training.checkpoints import Checkpoints
from harness.suite.training.step_file import StepFile
from harness.training.learner.learner import Learner

WEIGHTS_SECONDS = "weights/seconds"
"""Duration from the first byte written to the last gate opened."""


class Publication:
    """Publishes version n, after n steps, as safetensors. Appends to `weights.jsonl`."""

    def __init__(self, services: OwnServices, checkpoints: Checkpoints, directory: RunDirectory) -> None:
        self._services = services
        self._updater = WeightUpdater([services.engine], [services.address])
        self._checkpoints = checkpoints
        self._updates = StepFile(directory.path / "weights.jsonl")

    async def publish(self, learner: Learner) -> dict[str, float]:
        """Publish the weights. Returns the figures. Raises `EngineError`, `LearnerError` or `StoreError`."""
        began = asyncio.get_running_loop().time()
        saving = asyncio.to_thread(self._checkpoints.save_model, learner)
        folder = await to_the_end(saving)  # cannot stop the thread: keep the run's locks until it ends
        async with SessionServerClient(self._services.address) as server:
            live = len(await server.sessions())
        async with self._updater.update(learner.step) as update:
            await update.apply(folder)
        await asyncio.to_thread(self._checkpoints.remove_models, but=learner.step)
        figures = {
            **update.report.telemetry(),
            "weights/live_sessions": live,
            "weights/problems": len(update.report.problems),
            WEIGHTS_SECONDS: asyncio.get_running_loop().time() - began,
        }
        await asyncio.to_thread(self._updates.append, msgspec.json.encode(figures))
        return figures
