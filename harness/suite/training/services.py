"""What a training run stands on: an engine, a session server in front of it, and a learner.

The local engine is a process of its own here. In one process with the learner both would share the interpreter and the
threads of torch, and nothing would overlap.
"""

import asyncio
from pathlib import Path

from harness.engines.connect import EngineName
from harness.lanes import LaneEngine
from harness.learner.learner import Learner
from harness.learner.scripted import ScriptedLearner
from harness.suite.run.services import EngineChoice, find_model
from harness.suite.scenarios.folder import ScenarioFolder
from harness.suite.scenarios.train_spec import TrainSpec


async def choose_engine(folder: ScenarioFolder) -> EngineChoice:
    """The engine that `folder` is trained with; its model is made now where a program makes it.

    Raises `ModelError` when that fails.
    """
    choice = EngineChoice.of(folder)
    if choice.model_program is not None:
        choice = choice._replace(model=str(await find_model(choice)), model_program=None)
    if choice.name == LaneEngine.LOCAL:
        choice = choice._replace(name=f"lanes={LaneEngine.LOCAL}", lanes=(LaneEngine.LOCAL,))
    return choice


async def open_learner(choice: EngineChoice, train: TrainSpec) -> Learner:
    """A learner that begins with the weights of `choice`; a scripted engine has none, and its learner is scripted, too.

    Raises `LearnerError` when it cannot load them.
    """
    if not choice.lanes and not choice.workers and EngineName.parse(choice.name).plays_script:
        return ScriptedLearner()
    model_dir = await find_model(choice)
    return await asyncio.to_thread(_open_torch_learner, model_dir, train)


def _open_torch_learner(model_dir: Path, train: TrainSpec) -> Learner:
    from harness.learner.settings import LossKind, LossSettings, OptimizerSettings
    from harness.learner.torch_learner import TorchLearner

    loss, optimizer = train.loss, train.optimizer
    return TorchLearner.open(
        model_dir,
        LossSettings(LossKind(loss.name), loss.clip_low, loss.clip_high, loss.weight_cap),
        OptimizerSettings(**optimizer.model_dump()),
    )
