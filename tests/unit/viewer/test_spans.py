"""The spans of a run: read as the schema of OTLP has them, and equal to the record."""

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from harness.cli.look.reports import report
from harness.errors import RunError
from harness.server.telemetry.tracing.spans import ATTRIBUTES
from harness.suite.record.rundir import RunDirectory
from harness.types import Json
from harness.viewer.look import look_at, look_into
from harness.viewer.run_view import SessionLine
from harness.viewer.session_view import SessionView
from harness.viewer.spans import SPANS_FILE, session_spans
from tests.otlp_collector import read_request, said
from tests.recorded_runs import write_run

DOCS = Path(__file__).parents[3] / "docs" / "looking.md"
SECOND = 1_000_000_000


@pytest.fixture(name="run")
async def _run(tmp_path: Path) -> RunDirectory:
    return await write_run(tmp_path / "run", [("Two.", 0.5), ("Two and more.", None)])


def _spans(record: Json, line: SessionLine | None = None) -> list[Span]:
    spans = list(session_spans(line or SessionLine("a"), SessionView.of(record)))
    text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]})
    return read_request(text)


def test_a_run_has_a_trace_per_session(run: RunDirectory, tmp_path: Path):
    """Session, turns and engine requests with the times of the record, each below the one that it is part of."""
    report(run.path, out=tmp_path / "spans", kind="otel")
    text = (tmp_path / "spans" / SPANS_FILE).read_text("utf-8")
    lines = look_at(run.path).sessions

    traces = [read_request(line) for line in text.splitlines()]
    assert len(traces) == len(lines) == 2
    for line, spans in zip(lines, traces, strict=True):
        session = look_into(run.path, str(line.session_id))
        assert [span.name for span in spans] == ["session", *["turn", "engine request"] * 2]
        assert len({span.trace_id for span in spans}) == 1
        assert len({span.span_id for span in spans}) == len(spans)
        assert [span.parent_span_id for span in spans] == [
            b"",
            spans[0].span_id,
            spans[1].span_id,
            spans[0].span_id,
            spans[3].span_id,
        ]
        assert [said(span)["harness.turn.index"] for span in spans[1::2]] == [0, 1]
        assert [span.start_time_unix_nano for span in spans[1::2]] == [
            int(t.created_at * SECOND) for t in session.turns
        ]
        assert [span.start_time_unix_nano for span in spans[2::2]] == [
            int(turn.requests[0]["began_at"] * SECOND) for turn in session.turns
        ]
        for above, below in ((0, 1), (0, 3), (1, 2), (3, 4)):
            assert spans[above].start_time_unix_nano <= spans[below].start_time_unix_nano
            assert spans[below].end_time_unix_nano <= spans[above].end_time_unix_nano
        tokens = [said(span)["gen_ai.usage.output_tokens"] for span in spans[1:]]
        assert tokens == [count for turn in session.turns for count in (turn.output_length, turn.output_length)]
        assert {key for span in spans for key in said(span)} <= set(ATTRIBUTES)
    assert [spans[0].status.code for spans in traces] == [1, 2]
    assert len({spans[0].trace_id for spans in traces}) == 2
    report(run.path, out=tmp_path / "again", kind="otel")
    assert (tmp_path / "again" / SPANS_FILE).read_text("utf-8") == text


def _record(**turn: Any) -> Json:
    whole = {"turn": 0, "parent": None, "status": "completed", "created_at": 10.0, "seconds": 6.0, **turn}
    return {"session_id": "a", "phase": "closed", "turns": [whole]}


def test_a_turn_that_was_held_and_cut_short():
    """It begins when its call came, ends with its last request, and each request has its worker and its weights."""
    requests = [
        {"request_id": "r0", "start": 0, "end": 2, "began_at": 11.0, "seconds": 1.0, "queued_s": 0.5, "worker": "w0"},
        {"request_id": "r1", "start": 2, "end": 6, "began_at": 15.0, "seconds": 2.5, "queued_s": 0.0, "worker": "w1"},
    ]
    versions = [{"version": "3", "start": 0, "end": 2}, {"version": "5", "start": 2, "end": 6}]
    notes = {"held_before_s": 2.0, "held_s": 1.0, "error": {"code": "engine_down"}, "attempts": 2}
    session, turn, first, second = _spans(
        _record(segments=requests, weight_versions=versions, notes=notes, output_length=6)
    )

    assert (turn.start_time_unix_nano, turn.end_time_unix_nano) == (8 * SECOND, int(17.5 * SECOND))
    assert (session.start_time_unix_nano, session.end_time_unix_nano) == (8 * SECOND, int(17.5 * SECOND))
    assert (said(turn)["error.type"], turn.status.code) == ("engine_down", 2)
    assert (said(turn)["harness.turn.held_seconds"], said(turn)["harness.turn.attempts"]) == (3.0, 2)
    assert [said(each)["harness.request.worker"] for each in (first, second)] == ["w0", "w1"]
    labels = [said(each)["harness.weight_versions"] for each in (first, second)]
    assert [[value.string_value for value in each.values] for each in labels] == [["3"], ["5"]]


def test_what_an_agent_chose_steers_nobody_and_what_is_no_number_is_left_out():
    """A scenario's name with escapes, a reward that is none; and records of earlier versions have no requests."""
    line = SessionLine("a", scenario="\x1b[2J\u202ename", reward=float("nan"))
    session, turn = _spans(_record(segments=[{"request_id": "r0", "start": 0, "end": 2}]), line)

    assert said(session)["harness.scenario"] == "\\x1b[2J\\u202ename"
    assert "harness.reward" not in said(session)
    assert turn.name == "turn"


def test_a_session_that_is_damaged_is_said_and_the_others_are_there(
    run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A time that is none costs its session, and nothing of the rest."""
    with closing(sqlite3.connect(run.database)) as connection:
        connection.execute(
            "UPDATE turns SET created_at = -1e300 WHERE session_id = (SELECT min(session_id) FROM turns)"
        )
        connection.commit()
    report(run.path, out=tmp_path / "spans", kind="otel")

    assert "5 spans, 1 missing" in capsys.readouterr().out
    assert len((tmp_path / "spans" / SPANS_FILE).read_text("utf-8").splitlines()) == 1


def test_every_attribute_is_in_the_table_of_the_docs():
    table = DOCS.read_text("utf-8").partition("### Spans for OpenTelemetry")[2].partition("\n#")[0]
    assert dict(re.findall(r"^- `([^`]+)`: (.+)$", table, flags=re.MULTILINE)) == dict(ATTRIBUTES)


async def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path):
    """A folder with something in it, a file, a path that is no run."""
    run = await write_run(tmp_path / "run", [("Two.", 0.5)])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine").touch()
    before = {*tmp_path.iterdir()}
    for out in (tmp_path / "taken", run.config, tmp_path / "nowhere" / "spans"):
        with pytest.raises(RunError, match="expected a"):
            report(run.path, out=out, kind="otel")
    with pytest.raises(RunError, match="expected a run directory"):
        report(tmp_path / "nothing", out=tmp_path / "spans", kind="otel")
    with pytest.raises(RunError, match="without --format"):
        report(run.path, out=tmp_path / "spans", plots=True, kind="otel")
    assert {*tmp_path.iterdir()} == before
