"""Stores of metrics that get the figures of each training step while training goes on.

Each needs the extra of its name. The keys are those of `telemetry.jsonl`, the step is the number of committed steps.
Writing blocks.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from harness.machine.extras import require_package

ReportStep = Callable[[int, Mapping[str, float]], None]
"""Reports the figures of a step, given the number of steps so far."""


class StepStore(StrEnum):
    """Store of metrics."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"


@contextmanager
def report_steps(stores: Sequence[StepStore], run: Path) -> Iterator[ReportStep]:
    """Yield a function that reports a step to every store, in folders of the directory `run`.

    A run that is opened again continues in its stores. Raises `ScenarioError` for a store whose package is missing.
    """
    with ExitStack() as stack:
        writers = [stack.enter_context(_OPEN[store](run.absolute())) for store in dict.fromkeys(stores)]

        def report(steps: int, figures: Mapping[str, float]) -> None:
            finite = {key: float(value) for key, value in figures.items() if math.isfinite(value)}
            for write in writers:
                write(steps, finite)

        yield report


@contextmanager
def _open_tensorboard(run: Path) -> Iterator[ReportStep]:
    require_package("tensorboardX", "tensorboard", "reports to TensorBoard")
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(run / "tensorboard"), write_to_disk=True) as writer:

        def write(steps: int, figures: Mapping[str, float]) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, steps)
            writer.flush()

        yield write


@contextmanager
def _open_wandb(run: Path) -> Iterator[ReportStep]:
    require_package("wandb", "wandb", "reports to Weights & Biases")
    import wandb

    settings = wandb.Settings(console="off", quiet=True, disable_git=True, save_code=False)
    # Mode, project, entity and key are those of wandb's own variables. A resumed run goes on in its curves by its id.
    kept = run / "wandb.id"
    if not kept.exists():
        kept.write_text(uuid4().hex[:16])
    number = kept.read_text()
    reported = wandb.init(name=run.name, dir=str(run), id=number, resume="allow", settings=settings)
    try:
        reported.define_metric("*", step_metric="global_step")
        yield lambda steps, figures: reported.log(dict(figures), step=steps)
    finally:
        reported.finish()


_OPEN: Mapping[StepStore, Callable[[Path], AbstractContextManager[ReportStep]]] = {
    StepStore.TENSORBOARD: _open_tensorboard,
    StepStore.WANDB: _open_wandb,
}
