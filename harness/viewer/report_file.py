"""The file of a report: written whole or not at all, and never over a file that is no report."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import RunError
from harness.machine.disk import begins_with, replacing
from harness.viewer import report_formats
from harness.viewer.report import Report, make_report
from harness.viewer.report_plots import draw


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
    """Write the report of `run` in the format of `out`'s suffix, and its charts if `plots`.

    Raises `RunError` for a bad run, or an `out` that cannot take the report; `StoreError` for a bad store.
    """
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
