"""The file of a report: written whole or not at all, and never over a file that is no report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from harness.errors import RunError
from harness.machine.disk import begins_with, replacing
from harness.viewer import report_formats
from harness.viewer.damaged_run import say_missing
from harness.viewer.report import Chart, Report, make_report

_BARS = 20
_NAME = 40  # characters


def draw(charts: Sequence[Chart], missing: list[str]) -> list[tuple[str, bytes]]:
    """Return the title and picture of each chart; failures go to `missing`. Raises `RunError` without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RunError(f"--plots needs matplotlib ({error}): pip install 'session-harness[plots]'") from None
    pictures: list[tuple[str, bytes]] = []
    for chart in charts:
        with (
            say_missing(f"the chart {chart.title}", missing),
            rc_context({"svg.hashsalt": "harness", "svg.fonttype": "path"}),  # equal charts give equal bytes
        ):
            figure = Figure(figsize=(6, 3), layout="constrained")
            axes = figure.subplots()
            if chart.bars:
                bars = list(chart.bars.items())[:_BARS]
                axes.barh([_plain(name) for name, _ in bars], [count for _, count in bars])
                axes.invert_yaxis()
            else:
                axes.hist(chart.values, bins=20)
                axes.set_ylabel("count")
            axes.set_xlabel(chart.label)
            axes.set_title(_plain(chart.title))
            file = BytesIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            pictures.append((chart.title, file.getvalue()))
    return pictures


def _plain(name: str) -> str:
    # ASCII, because fonts lack other characters. `$` would begin a formula.
    return ascii(name)[1:-1][:_NAME].replace("$", r"\$")


@dataclass(frozen=True, slots=True)
class _Format:
    write: Callable[[Report], str]
    beginning: str
    """Prefix that identifies a report."""


_HTML = _Format(report_formats.write_html, report_formats.HTML_BEGINNING)
_JUNIT = _Format(report_formats.write_junit, report_formats.JUNIT_BEGINNING)
_FORMATS = {
    ".html": _HTML,
    ".md": _Format(report_formats.write_markdown, report_formats.MARKDOWN_BEGINNING),
    ".xml": _JUNIT,
    ".junit": _JUNIT,
}


def write_report(run: Path, out: Path, *, plots: bool) -> Report:
    """Write the report of `run` as `out`'s suffix says, with charts if `plots`. Raises `RunError`, `StoreError`."""
    kind = _FORMATS.get(out.suffix)
    if kind is None or (plots and kind is not _HTML):
        endings = ".html, which --plots needs" if plots else ", ".join(_FORMATS)
        raise RunError(f"expected a file with the ending {endings}; got --out {out}")
    if out.is_dir() or (out.exists() and not begins_with(out, kind.beginning)):
        raise RunError(f"expected a place for the report, found something else at {out}: name another file with --out")
    report = make_report(run)
    if plots:
        missing = list(report.missing)
        pictures = draw(report.charts, missing)
        report = replace(report, missing=missing)
        text = report_formats.write_html(report, pictures)
    else:
        text = kind.write(report)
    try:
        with replacing(out) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"expected a place for the report, cannot write {out}: {error.strerror}") from error
    return report
