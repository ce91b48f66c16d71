"""`harness train`: optimizer steps on the rollouts of a scenario, with the Ctrl+C stages of `harness run`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options, output
from harness.errors import RunError
from harness.training.step_stores import StepStore

if TYPE_CHECKING:
    from harness.suite.training.report import TrainReport

_Scenario = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO_OR_DIR",
        help="A bundled scenario, or a folder whose scenario.toml has a table `train`; with --resume, a run directory.",
    ),
]
_Steps = Annotated[int, typer.Option(min=1, help="Total weight updates, including a resumed run's earlier ones.")]
_Seed = Annotated[int | None, options.option("HARNESS_SEED", "Random seed.  [default: the scenario's]", min=0)]
_Out = Annotated[Path | None, options.option("HARNESS_OUT", "Run directory.  [default: runs/<scenario>-<time>]")]
_Resume = Annotated[bool, typer.Option("--resume", help="Continue after the last committed step.")]

_MetricsPort = Annotated[
    int | None,
    options.option(
        "HARNESS_METRICS_PORT",
        "Serve the figures of the last step to Prometheus on this port of 127.0.0.1; 0 picks a free one.",
        min=0,
        max=65535,
    ),
]

_Report = Annotated[
    list[StepStore] | None,
    options.option("HARNESS_REPORT", "Report each step to this store (extra of its name); may be repeated."),
]

_SILENCE_S = 10.0
"""Silence after which a pipe gets a status line."""


def train(
    scenario: _Scenario,
    *,
    steps: _Steps,
    seed: _Seed = None,
    out: _Out = None,
    resume: _Resume = False,
    dry_run: options.DryRun = False,
    metrics_port: _MetricsPort = None,
    report: _Report = None,
    otlp: options.Otlp = None,
    as_json: options.Json = False,
) -> None:
    """Train the scenario's model on its rollouts: collect, pack, update the weights, repeat.

    Exit codes: 0 all steps are done, 2 interrupted, 3 internal error, 4 usage, 5 nothing selected, 6 infrastructure
    failed.

    Examples: `harness train train_tool_game --steps 150`, `harness train DIR --steps 10 --seed 1 --out runs/one`,
    `harness train runs/one --steps 20 --resume`
    """
    from harness.suite.record.config import Overrides, select
    from harness.suite.run.open_run import begin_run, resume_run

    otlp = options.require_collector(otlp)
    if dry_run:
        from harness.cli.runs.summary import print_dry_run

        if resume:
            raise RunError("expected --dry-run or --resume, got both: `harness show RUN` has what is left of a run")
        print_dry_run(select(scenario, Overrides(seed=seed), trains=True), None, steps=steps, as_json=as_json)
        return
    from harness.cli.runs.progress import run_resumably
    from harness.suite.training.train_run import TrainRun

    opened = (resume_run if resume else begin_run)(scenario, Overrides(seed=seed), out, trains=True)
    trained = run_resumably(
        lambda progress, interrupts: TrainRun(
            opened, steps, progress.say, interrupts, metrics_port, otlp, report or ()
        ).execute(),
        ["train", str(opened.directory.path), "--steps", str(steps)],
        silence_s=_SILENCE_S,
    )
    output.print_result(trained.to_json(), _describe(trained), as_json=as_json)
    raise typer.Exit(trained.exit_code)


def _describe(trained: "TrainReport") -> str:
    from harness.viewer.terminal import ledger_words

    told = trained.to_json()
    rewards = (told["reward_mean_first_ten"], told["reward_mean_last_ten"])
    first, last = ("-" if each is None else f"{each:.3f}" for each in rewards)
    lines = [
        f"steps    {told['steps']} of {trained.wanted}, {trained.seconds:.1f} s",
        f"reward   {first} in the first ten steps, {last} in the last ten",
        f"ledger   {ledger_words(trained.ledger)}",
        *(f"audit    {verdict}" for verdict in (trained.audit or {}).get("verdicts", ())),
        f"run      {trained.directory}",
    ]
    return "\n".join(lines)
