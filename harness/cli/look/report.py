"""`harness report`: the figures of a run as a page, as Markdown, or for a CI system."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import output

_Where = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the file of a store.")]
_Out = Annotated[
    Path,
    typer.Option(
        "--out", metavar="FILE", help="Its ending says what it is: .html, .md, .xml or .junit.", show_default=False
    ),
]
_Plots = Annotated[bool, typer.Option("--plots", help="A page with charts, too, which takes the extra `plots`.")]


def report(where: _Where, *, out: _Out, plots: _Plots = False) -> None:
    """Write rewards, lengths, seconds, ends, drops and version lags of a run; for CI a test case per session.

    Exits with 0 when it has written the report, whatever it says of the run.

    Examples: `harness report runs/DIR --out report.html --plots`, `harness report runs/DIR --out report.xml`
    """
    from harness.viewer.report_file import write_report

    found = write_report(where, out, plots=plots)
    output.print_text(f"{out}: {len(found.tables)} tables, {len(found.cases)} cases, {len(found.missing)} missing")
