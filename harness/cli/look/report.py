"""`harness report`: figures of a run as a page, Markdown or CI results, or its spans."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.cli import output
from harness.errors import RunError

_Where = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the file of a store.")]
_Out = Annotated[
    Path,
    typer.Option(
        metavar="PATH",
        help="Output file, whose suffix sets the format: .html, .md, .xml or .junit; with --format a new folder.",
    ),
]
_Plots = Annotated[bool, typer.Option("--plots", help="Add charts to the page; needs the extra `plots`.")]
_Format = Annotated[
    Literal["otel"] | None, typer.Option("--format", help="Write OpenTelemetry spans instead, into a new folder.")
]


def report(where: _Where, *, out: _Out, plots: _Plots = False, kind: _Format = None) -> None:
    """Write rewards, lengths, seconds, ends, drops and version lags of a run; for CI a test case per session.

    Exits with 0 after writing the report, even if the run failed.

    Examples: `harness report runs/DIR --out report.html --plots`, `harness report runs/DIR --out report.xml`, `harness
    report runs/DIR --out spans --format otel`
    """
    if kind is not None:
        from harness.viewer.spans import export_spans

        if plots:
            raise RunError(f"expected --plots without --format; got --format {kind}")
        missing: list[str] = []
        output.print_text(f"{out}: {export_spans(where, out, missing)} spans, {len(missing)} missing")
        return
    from harness.viewer.report_file import write_report

    found = write_report(where, out, plots=plots)
    output.print_text(f"{out}: {len(found.tables)} tables, {len(found.cases)} cases, {len(found.missing)} missing")
