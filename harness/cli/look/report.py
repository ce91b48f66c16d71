"""`harness report`: figures of a run as a page, Markdown, CI results, metrics or spans."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.cli import output
from harness.errors import RunError

Format = Literal["tensorboard", "wandb", "otel"]
"""Members of `ExportFormat`, whose import would load NumPy."""

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
    Format | None,
    typer.Option("--format", help="Export to a metrics store, which needs the extra of that name, or as spans."),
]


def report(where: _Where, *, out: _Out, plots: _Plots = False, kind: _Format = None) -> None:
    """Write rewards, lengths, seconds, ends, drops and version lags of a run; for CI a test case per session.

    Exits with 0 after writing the report, whatever it contains.

    Examples: `harness report runs/DIR --out report.html --plots`, `harness report runs/DIR --out report.xml`, `harness
    report runs/DIR --out events --format tensorboard`
    """
    if kind is not None:
        from harness.viewer.exports.export import ExportFormat, export_run

        if plots:
            raise RunError(f"expected --plots without --format; got --format {kind}")
        exported = export_run(where, out, ExportFormat(kind))
        unit = "spans" if kind == "otel" else "values"
        output.print_text(f"{out}: {exported.written} {unit}, {len(exported.missing)} missing")
        return
    from harness.viewer.report_file import write_report

    found = write_report(where, out, plots=plots)
    output.print_text(f"{out}: {len(found.tables)} tables, {len(found.cases)} cases, {len(found.missing)} missing")
