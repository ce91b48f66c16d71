"""Stores of metrics that get the figures of each training step while training continues.

Each needs the extra of its name. The keys are those of `telemetry.jsonl`, the step is the number of committed steps.
Writing blocks.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from harness.machine.extras import require_package

ReportStep = Callable[[int, Mapping[str, float]], None]
"""Reports the figures of a step, given the number of steps so far."""


_LATEST_S = 1
"""Seconds after which a figure is in its file."""


class StepStore(StrEnum):
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"


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

    # It writes in a thread, for which `flush` does not wait.
    with SummaryWriter(str(run / "tensorboard"), flush_secs=_LATEST_S) as writer:

        def write(steps: int, figures: Mapping[str, float]) -> None:
            for key, value in figures.items():
                writer.add_scalar(key, value, steps)

        yield write


@contextmanager
def _open_wandb(run: Path) -> Iterator[ReportStep]:
    require_package("wandb", "wandb", "reports to Weights & Biases")
    import wandb

    settings = wandb.Settings(console="off", quiet=True, disable_git=True, save_code=False)
    # Mode, project, entity and key come from wandb's own variables. A trainer may have a run of its own here.
    reported = wandb.init(
        name=run.name, dir=str(run), id=_read_id(run), resume="allow", reinit="create_new", settings=settings
    )
    try:
        reported.define_metric("*", step_metric="global_step")
        yield lambda steps, figures: reported.log(dict(figures), step=steps)
    finally:
        reported.finish()


@contextmanager
def _open_trackio(run: Path) -> Iterator[ReportStep]:
    require_package("trackio", "trackio", "reports to trackio")
    import trackio

    # Folder, Space and server come from trackio's own variables. It prints what it does.
    with redirect_stdout(sys.stderr):
        reported = trackio.init(
            project="session-harness",
            name=f"{run.name}-{_read_id(run)}",
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    try:
        yield lambda steps, figures: reported.log(dict(figures), step=steps)
    finally:
        with redirect_stdout(sys.stderr):
            reported.finish()


def _read_id(run: Path) -> str:
    """Return the id by which a resumed run continues in its curves."""
    kept = run / "wandb.id"
    if not kept.exists():
        kept.write_text(uuid4().hex[:16])
    return kept.read_text()


_OPEN: Mapping[StepStore, Callable[[Path], AbstractContextManager[ReportStep]]] = {
    StepStore.TENSORBOARD: _open_tensorboard,
    StepStore.WANDB: _open_wandb,
    StepStore.TRACKIO: _open_trackio,
}
