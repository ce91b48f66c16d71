"""The file of a report: HTML, Markdown or JUnit XML, written whole or not at all, never over a file that is no report.

Recorded text is data: control characters and bidirectional marks are written out and markup is escaped. The page's
content security policy admits only its own style and embedded pictures.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from harness.errors import RunError
from harness.machine.disk import begins_with, replacing
from harness.server.telemetry.printable import printable
from harness.viewer.report import Case, CaseResult, Chart, FigureTable, Report, make_report
from harness.viewer.run_view import say_missing

_HTML_BEGINNING = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<title>harness report</title>'
_MARKDOWN_BEGINNING = "# harness report: "
_JUNIT_BEGINNING = '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="harness report"'
_BARS = 20
_NAME = 40  # characters
_STYLE = (
    ":root{color-scheme:light dark;font:15px/1.4 system-ui,sans-serif}body{max-width:70rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse}th,td{text-align:left;vertical-align:top;padding:.15rem .8rem"
    " .15rem 0;border-bottom:1px solid #8884;overflow-wrap:anywhere}"
    "th{overflow-wrap:normal;white-space:nowrap}img{background:#fff;max-width:100%}"
)
# Marks of Markdown and HTML, and marks that code hosts turn into links and pictures.
_MARKUP = re.compile(r"[\\`*\[\]#|~$<>&@]|\b_+|_+\b|:(?=[^\s\d])")


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


def write_html(report: Report, pictures: Sequence[tuple[str, bytes]] = ()) -> str:
    """Return an HTML page. `pictures` are titles and SVG documents."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    parts = [
        f'{_HTML_BEGINNING}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{_html(report.source)}</h1>",
    ]
    for table in report.tables:
        parts.append(f"<h2>{_html(table.title)}</h2>\n<table>")
        parts.append(f"<tr>{''.join(f'<th>{_html(name)}</th>' for name in table.columns)}</tr>")
        parts += [f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in row)}</tr>" for row in table.rows]
        parts.append("</table>")
    for title, picture in pictures:
        data = base64.b64encode(picture).decode()
        parts.append(f'<h2>{_html(title)}</h2>\n<img alt="{_html(title)}" src="data:image/svg+xml;base64,{data}">')
    if report.missing:
        parts.append("<h2>Missing</h2>\n<ul>")
        parts += [f"<li>{_html(sentence)}</li>" for sentence in report.missing]
        parts.append("</ul>")
    return "\n".join([*parts, "</body></html>\n"])


def write_markdown(report: Report) -> str:
    """Return Markdown with tables, as code hosts render it."""
    parts = [f"{_MARKDOWN_BEGINNING}{_markdown(report.source)}", ""]
    for table in report.tables:
        parts += [f"## {_markdown(table.title)}", "", *_markdown_rows(table), ""]
    if report.missing:
        parts += ["## Missing", "", *(f"- {_markdown(sentence)}" for sentence in report.missing), ""]
    return "\n".join(parts)


def write_junit(report: Report) -> str:
    """Return a test suite per scenario, with a case per session and check, and one for the run."""
    cases = sorted(report.cases, key=lambda case: case.suite)  # stable: sessions stay in their order
    root = ET.Element("testsuites", {"name": "harness report", **_counts(cases)})
    for name, grouped in groupby(cases, key=lambda case: case.suite):
        members = list(grouped)
        suite = ET.SubElement(root, "testsuite", {"name": printable(name), **_counts(members)})
        for case in members:
            attributes = {"classname": printable(name), "name": printable(case.name), "time": f"{case.seconds:.3f}"}
            element = ET.SubElement(suite, "testcase", attributes)
            if case.result is not CaseResult.PASSED:
                reason = printable(case.reason)
                ET.SubElement(element, _JUNIT[case.result], {"message": reason}).text = reason
    if report.missing:
        said = ET.SubElement(ET.SubElement(root, "testsuite", {"name": "missing", **_counts([])}), "system-out")
        said.text = "\n".join(map(printable, report.missing))
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


_JUNIT = {CaseResult.FAILED: "failure", CaseResult.ERROR: "error", CaseResult.UNKNOWN: "skipped"}


def _counts(cases: Sequence[Case]) -> dict[str, str]:
    names = {"failures": CaseResult.FAILED, "errors": CaseResult.ERROR, "skipped": CaseResult.UNKNOWN}
    counts = {name: str(sum(case.result is verdict for case in cases)) for name, verdict in names.items()}
    return {"tests": str(len(cases)), **counts, "time": f"{sum(case.seconds for case in cases):.3f}"}


def _html(text: str) -> str:
    return escape(printable(text))


def _markdown(text: str) -> str:
    # A line break would end the table row.
    line = " ".join(printable(text).split())
    return _MARKUP.sub(lambda marks: "".join(f"&#{ord(mark)};" for mark in marks[0]), line)


def _markdown_rows(table: FigureTable) -> Iterator[str]:
    for row in (table.columns, ["---"] * len(table.columns), *table.rows):
        cells = row if row and row[0] == "---" else [_markdown(cell) for cell in row]
        yield f"| {' | '.join(cells)} |"


class _Format(NamedTuple):
    write: Callable[[Report], str]
    beginning: str
    """Prefix that identifies a report."""


_HTML = _Format(write_html, _HTML_BEGINNING)
_XML = _Format(write_junit, _JUNIT_BEGINNING)
_FORMATS = {".html": _HTML, ".md": _Format(write_markdown, _MARKDOWN_BEGINNING), ".xml": _XML, ".junit": _XML}


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
        text = write_html(report, pictures)
    else:
        text = kind.write(report)
    try:
        with replacing(out) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"expected a place for the report, cannot write {out}: {error.strerror}") from error
    return report
