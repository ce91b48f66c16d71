"""Choose engine and learner of a training run."""

import asyncio
from pathlib import Path

from harness.engines.connect import EngineName
from harness.lab.lanes import LaneEngine
from harness.suite.run.services import EngineChoice, find_model
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.train_spec import TrainSpec
from harness.training.learner.learner import Learner
from harness.training.learner.scripted import ScriptedLearner


async def choose_engine(folder: ScenarioFolder) -> EngineChoice:
    """Return the engine, and run its model program, if any. Raises `ModelError`."""
    choice = EngineChoice.of(folder)
    if choice.model_program is not None:
        choice = choice._replace(model=str(await find_model(choice)), model_program=None)
    # Sharing the interpreter and torch's threads with the learner would prevent overlap: use another process.
    if choice.name == LaneEngine.LOCAL:
        choice = choice._replace(name=f"lanes={LaneEngine.LOCAL}", lanes=(LaneEngine.LOCAL,))
    return choice


async def open_learner(choice: EngineChoice, train: TrainSpec) -> Learner:
    """Open a learner with the weights of `choice`; a scripted one for a scripted engine.

    Raises `LearnerError` when the weights cannot be loaded.
    """
    if not choice.lanes and not choice.workers and EngineName.parse(choice.name).plays_script:
        return ScriptedLearner()
    model_dir = await find_model(choice)
    return await asyncio.to_thread(_open_torch_learner, model_dir, train)


def _open_torch_learner(model_dir: Path, train: TrainSpec) -> Learner:
    from harness.training.learner.settings import LossKind, LossSettings, OptimizerSettings
    from harness.training.learner.torch_learner import TorchLearner

    loss, optimizer = train.loss, train.optimizer
    return TorchLearner.open(
        model_dir,
        LossSettings(LossKind(loss.name), loss.clip_low, loss.clip_high, loss.weight_cap),
        OptimizerSettings(**optimizer.model_dump()),
    )
