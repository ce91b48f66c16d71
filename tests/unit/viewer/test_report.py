"""The report on a run: its figures by hand, each format read back by somebody else's parser, and what cannot be had."""

import base64
import hashlib
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from harness.cli.look.reports import report
from harness.errors import RunError
from harness.suite.record.rundir import RunDirectory
from harness.types import Json
from harness.viewer.report import CaseResult, FigureTable, make_report
from harness.viewer.session_figures import TurnParts, measure
from harness.viewer.session_view import SessionView
from tests.recorded_runs import write_run

HOSTILE = "</table>]]><script>owned()</script> | `x` [a](http://b) & \x1b[2J\x00\x07\u202e\ufffe\udc80 end"
TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "table", "tr", "th", "td", "img"}
JUNIT = {"testsuites", "testsuite", "testcase", "failure", "error", "skipped", "system-out"}


@pytest.fixture(name="run")
async def _run(tmp_path: Path) -> RunDirectory:
    """Three rollouts: two with a reward, and one whose agent crashed with something nasty in its log."""
    run = await write_run(tmp_path / "run", [("Two.", 0.5), ("Two and more.", 1.0), ("Two.", None)])
    run.workdir(2).mkdir(parents=True)
    (run.workdir(2) / "agent.log").write_bytes(HOSTILE.encode("utf-8", "surrogatepass"))
    result = run.read_result() | {"status": "checks_failed", "scenarios": [_checks(HOSTILE.replace("\udc80", ""))]}
    run.write_json(run.result, result)
    return run


def _checks(seen: str) -> Json:
    holds = {"check": "min_turns", "expected": "1", "seen": "2", "holds": True}
    fails = {"check": "min_finished", "expected": "3", "seen": seen, "holds": False}
    return {"name": "small", "checks": [holds, fails]}


def _table(tables: Sequence[FigureTable], title: str) -> FigureTable:
    return next(table for table in tables if table.title == title)


def test_the_figures_of_a_run(run: RunDirectory):
    """Rewards, lengths, ends, tokens and sessions, as one counts them by hand."""
    found = make_report(run.path)

    assert _table(found.tables, "Rewards").rows == [["small", "2", "0.75", "0.5", "0.75", "0.975", "1"]]
    assert _table(found.tables, "Outcomes").rows == [["crashed", "1", "33.3%"], ["finished", "2", "66.7%"]]
    assert _table(found.tables, "Ends of turns").rows == [["model", "6"]]
    turns, tokens = _table(found.tables, "Lengths").rows[:2]
    assert turns == ["turns of a session", "3", "2", "2", "2", "2", "2"]
    assert tokens[1] == "3"
    sessions = _table(found.tables, "Sessions").rows
    assert [row[0] for row in sessions] == ["0", "1", "2"]
    trained = int(_table(found.tables, "Tokens").rows[0][1].replace(",", ""))
    assert sum(int(row[7]) for row in sessions) == trained
    assert found.missing == []
    prompts, problems = _table(found.tables, "Prompts"), _table(found.tables, "What went wrong")
    assert prompts.rows == [
        ["0 of small", "2", "0.75", "-", "1, session 1", "0.5, session 0"],
        ["pass@1 of small", "", "0.5", "", "", ""],
        ["pass@2 of small", "", "1", "", "", ""],
    ]
    assert [row[1:3] for row in problems.rows] == [["1", "session 2"]]


def test_the_parts_of_a_turn_are_told_apart():
    """Gate, queue, engine and the rest make up its seconds; a record that does not say them has none."""
    requests = [
        {"request_id": "a", "start": 0, "end": 2, "began_at": 11.0, "seconds": 2.0, "queued_s": 0.5, "worker": "0"},
        {"request_id": "b", "start": 2, "end": 6, "began_at": 14.0, "seconds": 3.0, "queued_s": 0.0, "worker": "1"},
    ]
    held = {"held_s": 1.0, "held_before_s": 1.5}
    record = _record(
        {"turn": 0, "parent": None, "created_at": 5.0, "seconds": 1.0, "segments": [{"request_id": "old"}]},
        {"turn": 1, "parent": 0, "created_at": 10.0, "seconds": 7.0, "segments": requests, "notes": held},
    )
    found = measure(SessionView.of(record))

    assert found.parts == [TurnParts(held=2.5, queued=0.5, engine=4.5, server=1.0)]
    assert found.between == [2.5]


def test_a_report_says_where_the_seconds_of_turns_went(run: RunDirectory):
    """A row for each part, with a value for each turn."""
    rows = {row[0]: row[1] for row in _table(make_report(run.path).tables, "Latency and throughput").rows}
    parts = {name.partition(": ")[2] for name in rows if name.startswith("seconds of a turn: ")}

    assert parts == {"held at the gate", "queued", "engine", "session server"}
    assert {rows[f"seconds of a turn: {part}"] for part in parts} == {rows["seconds of a turn"]} == {"6"}


def _record(*turns: Json) -> Json:
    return {"session_id": "a", "phase": "closed", "turns": [{"status": "completed", **turn} for turn in turns]}


def test_seconds_and_versions_of_a_session():
    """Turns that overlap have no time between them, and a token is behind the newest version of its session."""
    spans = [{"version": "3", "start": 0, "end": 4}, {"version": "5", "start": 4, "end": 6}]
    record = _record(
        {"turn": 0, "parent": None, "created_at": 10.0, "seconds": 2.0, "weight_versions": spans, "output_length": 6},
        {"turn": 1, "parent": 0, "created_at": 15.0, "seconds": 4.0, "output_length": 1},
        {"turn": 2, "parent": 0, "created_at": 16.0, "seconds": 1.0, "weight_versions": [spans[0] | {"version": "x"}]},
    )
    found = measure(SessionView.of(record))

    assert (found.began_at, found.ended_at, found.between) == (10.0, 19.0, [3.0])
    assert (found.seconds, found.outputs) == ([2.0, 4.0, 1.0], [6, 1, 0])
    assert found.lags == Counter({2: 4, 0: 2})
    with pytest.raises(ValueError, match="an invalid time"):
        measure(SessionView.of(_record({"turn": 0, "parent": None, "created_at": float("nan")})))


@pytest.mark.parametrize("ending", ["xml", "junit"])
def test_junit_has_a_case_for_each_session_and_each_check(run: RunDirectory, tmp_path: Path, ending: str):
    """With the reason of each failure, and counts that are right; nothing but what readers of JUnit know."""
    out = tmp_path / f"report.{ending}"
    report(run.path, out=out)
    root = ET.parse(out).getroot()

    assert {element.tag for element in root.iter()} <= JUNIT
    cases = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    assert set(cases) == {
        *(("small", f"rollout {number}") for number in range(3)),
        ("small", "check min_turns"),
        ("small", "check min_finished"),
        ("run", "status"),
    }
    assert [len(cases["small", f"rollout {number}"]) for number in range(3)] == [0, 0, 1]
    [failure] = cases["small", "rollout 2"]
    assert (failure.tag, failure.get("message")) == ("failure", failure.text)
    assert (failure.text or "").startswith("crashed: </table>]]><script>owned()")
    assert "\\x1b[2J\\x00\\x07\\u202e\\ufffe" in (failure.text or "")
    assert (root.get("tests"), root.get("failures"), root.get("errors")) == ("6", "3", "0")
    for suite in root.iter("testsuite"):
        assert int(suite.get("tests", "")) == len(suite.findall("testcase"))
        assert float(suite.get("time", "")) >= 0


class _Page(HTMLParser):
    """The start tags of a page with their attributes, and its texts by the tag that they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append((self.tags[-1][0] if self.tags else "", data))


@pytest.mark.xdist_group("matplotlib")
def test_nothing_that_was_recorded_is_markup_of_the_page(run: RunDirectory, tmp_path: Path):
    """The hostile text is text, characters that steer are written out, and the policy lets nothing else in."""
    out = tmp_path / "report.html"
    report(run.path, out=out, plots=True)
    text = out.read_text("utf-8")
    page = _Page(text)

    assert {tag for tag, _ in page.tags} <= TAGS
    assert any("</table>]]><script>owned()</script>" in said for tag, said in page.texts if tag == "td")
    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    [policy] = [str(attrs["content"]) for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    style = next(said for tag, said in page.texts if tag == "style")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:;")
    pictures = [str(attrs["src"]) for tag, attrs in page.tags if tag == "img"]
    assert len(pictures) >= 3
    for picture in pictures:
        svg = ET.fromstring(base64.b64decode(picture.removeprefix("data:image/svg+xml;base64,")))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"


def test_nothing_that_was_recorded_is_markup_of_markdown(run: RunDirectory, tmp_path: Path):
    """Each row has as many cells as its table has columns, and no mark is left."""
    out = tmp_path / "report.md"
    report(run.path, out=out)
    text = out.read_text("utf-8")

    assert [char for char in text if not char.isprintable() and char != "\n"] == []
    rows = [line for line in text.splitlines() if line.startswith("|")]
    [nasty] = [row for row in rows if "owned" in row and "crashed" in row]
    assert nasty.count("|") == len(make_report(run.path).tables[-1].columns) + 1
    assert not re.search(r"[<>`\[\]\\]", nasty)


@pytest.mark.xdist_group("matplotlib")
@pytest.mark.parametrize("ending", ["html", "md", "xml"])
def test_the_same_run_gives_the_same_report(run: RunDirectory, tmp_path: Path, ending: str):
    """To the byte, in the place of the first one too; charts included."""
    out = tmp_path / f"report.{ending}"
    report(run.path, out=out, plots=ending == "html")
    first = out.read_bytes()
    report(run.path, out=out, plots=ending == "html")
    assert out.read_bytes() == first


@pytest.mark.xdist_group("matplotlib")
def test_charts_have_titles_and_heads_of_tables_do_not_break(run: RunDirectory, tmp_path: Path):
    out = tmp_path / "report.html"
    report(run.path, out=out, plots=True)
    page = out.read_text()
    pictures = [base64.b64decode(each).decode() for each in re.findall(r"base64,([^\"]+)", page)]
    titles = re.findall(r'<img alt="([^"]+)"', page)

    assert len(pictures) == len(titles) > 1
    assert [title for title, picture in zip(titles, pictures, strict=True) if f"<!-- {title} -->" not in picture] == []
    assert "th{overflow-wrap:normal;white-space:nowrap}" in page


def test_a_run_that_is_not_whole_says_what_is_missing(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """One that was stopped is an error for CI, a damaged session is said and the others are counted."""
    run.result.unlink()
    run.lock.unlink()
    with closing(sqlite3.connect(run.database)) as connection:
        damage = "UPDATE turns SET messages_delta = '[5' WHERE session_id = (SELECT min(session_id) FROM turns)"
        assert connection.execute(damage).rowcount == 2
        connection.commit()
    found = make_report(run.path)

    assert {"its report", "what it ran with"} <= {sentence.split(":")[0] for sentence in found.missing}
    assert any(sentence.startswith("session ") for sentence in found.missing)
    assert _table(found.tables, "Ends of turns").rows == [["model", "4"]]
    assert [case.result for case in found.cases if case.name == "status"] == [CaseResult.ERROR]
    report(run.path, out=tmp_path / "report.xml")
    assert "missing" in capsys.readouterr().out

    run.database.unlink()
    bare = make_report(run.path)
    assert [case.name for case in bare.cases] == ["status"]
    assert any(sentence.startswith("its sessions") for sentence in bare.missing)


def test_the_file_of_a_store_has_a_report_without_outcomes(run: RunDirectory):
    """It does not say how a session ended, so no case has passed or failed."""
    found = make_report(run.database)
    assert {case.result for case in found.cases} == {CaseResult.UNKNOWN}
    assert _table(found.tables, "Ends of turns").rows == [["model", "6"]]


def test_no_other_file_is_overwritten(run: RunDirectory, tmp_path: Path):
    """Neither one that is no report, nor a folder; an ending that is no format is refused."""
    mine = tmp_path / "README.md"
    mine.write_text("# Mine")
    for out in (mine, tmp_path / "report.pdf", tmp_path / "nowhere" / "report.md"):
        with pytest.raises(RunError, match="expected a"):
            report(run.path, out=out)
    with pytest.raises(RunError, match="--plots needs"):
        report(run.path, out=tmp_path / "report.md", plots=True)
    with pytest.raises(RunError, match="expected a run directory"):
        report(tmp_path / "nothing", out=tmp_path / "report.md")
    assert mine.read_text() == "# Mine"
    assert sorted(path.name for path in tmp_path.glob("*report*")) == []


def test_charts_without_matplotlib_are_refused(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the extra that brings it; the tables need nothing."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match=r"session-harness\[plots\]"):
        report(run.path, out=tmp_path / "report.html", plots=True)
    report(run.path, out=tmp_path / "report.html")
