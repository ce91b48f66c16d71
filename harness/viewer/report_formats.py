"""A report as HTML, Markdown and JUnit XML.

Recorded text is data: control characters and bidirectional marks are written out and markup is escaped. The page's
content security policy admits only its own style and embedded pictures.
"""

import base64
import hashlib
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from xml.etree import ElementTree as ET

from harness.server.telemetry.printable import printable
from harness.viewer.report import Case, CaseResult, FigureTable, Report

HTML_BEGINNING = '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<title>harness report</title>'
MARKDOWN_BEGINNING = "# harness report: "
JUNIT_BEGINNING = '<?xml version="1.0" encoding="utf-8"?>\n<testsuites name="harness report"'

_STYLE = (
    ":root{color-scheme:light dark;font:15px/1.4 system-ui,sans-serif}body{max-width:70rem;margin:2rem auto;"
    "padding:0 1rem}table{border-collapse:collapse}th,td{text-align:left;vertical-align:top;padding:.15rem .8rem"
    " .15rem 0;border-bottom:1px solid #8884;overflow-wrap:anywhere}"
    "th{overflow-wrap:normal;white-space:nowrap}img{background:#fff;max-width:100%}"
)
# Marks of Markdown and HTML, and marks that code hosts turn into links and pictures.
_MARKUP = re.compile(r"[\\`*\[\]#|~$<>&@]|\b_+|_+\b|:(?=[^\s\d])")


def write_html(report: Report, pictures: Sequence[tuple[str, bytes]] = ()) -> str:
    """Return an HTML page. `pictures` are titles and SVG documents."""
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    parts = [
        f'{HTML_BEGINNING}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
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
    parts = [f"{MARKDOWN_BEGINNING}{_markdown(report.source)}", ""]
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
