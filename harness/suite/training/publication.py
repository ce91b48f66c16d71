"""The weights of the learner, brought to the engines under live sessions."""

import asyncio

import msgspec

from harness.client.session_server import SessionServerClient
from harness.control.weights import WeightUpdater
from harness.learner.learner import Learner
from harness.machine.deadlines import to_the_end
from harness.suite.record.rundir import RunDirectory
from harness.suite.run.services import OwnServices
from harness.suite.training.checkpoints import Checkpoints
from harness.suite.training.step_file import StepFile

WEIGHTS_SECONDS = "weights/seconds"
"""Of a publication, from the first byte written to the last gate opened."""


class Publication:
    """Version n is that after n steps; a folder of safetensors is what travels. `weights.jsonl` has a line for each."""

    def __init__(self, services: OwnServices, checkpoints: Checkpoints, directory: RunDirectory) -> None:
        self._services = services
        self._updater = WeightUpdater([services.engine], [services.address])
        self._checkpoints = checkpoints
        self._updates = StepFile(directory.path / "weights.jsonl")

    async def publish(self, learner: Learner) -> dict[str, float]:
        """The engines serve the weights of `learner` when this returns its figures.

        Raises `EngineError` when none of them does, `LearnerError` or `StoreError` when they cannot be written.
        """
        began = asyncio.get_running_loop().time()
        saving = asyncio.to_thread(self._checkpoints.save_model, learner)
        folder = await to_the_end(saving)  # in its thread it goes on, and the locks of the run must last
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
