"""`harness resume`: one rollout of a run, played again with its record."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options, output

_Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
_Session = Annotated[
    str, typer.Argument(metavar="SESSION", help="The number of one, or the beginning of its id.", show_default=False)
]


def resume(run: _Run, session: _Session, *, as_json: options.Json = False) -> None:
    """Play one rollout of a run again with its record: repeated calls get its answers, others are sampled.

    For a rollout that crashed or was cut short. The run keeps both records; the new attempt counts.

    Example: `harness resume runs/DIR 3`
    """
    from harness.cli.runs.run import execute_run
    from harness.cli.runs.summary import print_report, report_json
    from harness.errors import RunError
    from harness.suite.record.config import Overrides
    from harness.suite.run.open_run import resume_run
    from harness.viewer.look import look_at

    line = look_at(run).find(session)
    if line.number is None or line.session_id is None:
        raise RunError(f"expected the last session of a rollout of {run}, got {line.session_id or line.number}")
    opened = resume_run(str(run), Overrides(), run)
    if opened.selection.config.overrides.server is not None:
        raise RunError(f"expected a run with its own session server, which keeps records; {run} is of another server")
    report = execute_run(opened, only=frozenset({line.number}), goes_on=True)
    if as_json:
        output.print_json(report_json(report))
    else:
        print_report(report)
    raise typer.Exit(report.exit_code)
