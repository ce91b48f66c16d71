"""OpenTelemetry spans from a run's record: its session server's spans, with the rollout's outcome and reward."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from harness.errors import RunError
from harness.server.telemetry.tracing.spans import SERVICE, TracedSession, TracedSpan, TracedTurn
from harness.types import Json, TurnSegment, end_of_turn
from harness.viewer.look import look_at, look_into
from harness.viewer.run_view import SessionLine, say_missing
from harness.viewer.session_view import SessionView, TurnView

SPANS_FILE = "traces.jsonl"


def export_spans(run: Path, out: Path, missing: list[str]) -> int:
    """Write `SPANS_FILE` into `out`, a new or empty folder, whole or not at all. Return the number of spans.

    Raises `RunError` or `StoreError`.
    """
    with _new_folder(out) as folder:
        return write_spans(run, folder, missing)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise RunError(f"expected a new or empty folder, found something else at {out}: name another one with --out")
    try:
        # Next to `out`, so that the rename is atomic.
        with TemporaryDirectory(dir=out.parent, prefix=".export.") as scratch:
            folder = Path(scratch) / "folder"
            folder.mkdir()
            yield folder
            folder.rename(out)
    except OSError as error:
        raise RunError(f"expected a place for a folder, cannot write {out}: {error.strerror}") from error


def write_spans(run: Path, folder: Path, missing: list[str]) -> int:
    """Write an OTLP request per session to `SPANS_FILE`. Return the number of spans. Raises as `look_at`."""
    view = look_at(run)
    missing += view.missing
    count, gaps = 0, view.audit.get("sessions", {})
    with (folder / SPANS_FILE).open("wb") as file:
        for line in view.sessions:
            if line.session_id is None:
                continue
            spans: list[Json] = []
            with say_missing(f"session {line.session_id}", missing):
                spans = list(session_spans(line, look_into(run, line.session_id), gaps.get(line.session_id)))
            if spans:
                scope = {"scope": {"name": "harness"}, "spans": spans}
                resource = {"resource": {"attributes": _attributes(SERVICE)}, "scopeSpans": [scope]}
                file.write(msgspec.json.encode({"resourceSpans": [resource]}) + b"\n")
                count += len(spans)
    return count


def session_spans(line: SessionLine, session: SessionView, audit_gap: float | None = None) -> Iterator[Json]:
    """Yield the spans of `session`, parents first; none without turns. Raises `ValueError`, `OverflowError`."""
    turns = [_trace_turn(session.session_id, turn) for turn in session.turns]
    if not turns:
        return
    traced = TracedSession(
        session.session_id,
        len(turns),
        (min(turn.asked_at for turn in turns), max(turn.ended_at for turn in turns)),
        line.scenario,
        line.number,
        line.outcome,
        line.cause,
        line.reward,
        audit_gap,
    )
    yield from map(_to_json, traced.spans())
    for turn in turns:
        yield from map(_to_json, turn.spans())


def _trace_turn(session_id: str, turn: TurnView) -> TracedTurn:
    requests = [_trace_request(request) for request in turn.requests]
    asked_at = turn.created_at - turn.held_before_s
    return TracedTurn(
        session_id,
        turn.index,
        turn.parent,
        turn.status,
        turn.end,
        turn.attempts,
        turn.held_before_s + turn.held_s,
        None if turn.error is None else turn.error.get("code"),
        turn.prompt_length,
        turn.output_length,
        [(str(each["version"]), int(each["start"]), int(each["end"])) for each in turn.versions],
        requests,
        asked_at,
        end_of_turn(asked_at, turn.created_at + turn.seconds, ((each.began_at, each.seconds) for each in requests)),
        turn.traceparent,
    )


def _trace_request(request: Any) -> TurnSegment:
    began_at, reason = request.get("began_at"), request.get("finish_reason")
    return TurnSegment(
        request["request_id"],
        int(request["start"]),
        int(request["end"]),
        reason,
        None if began_at is None else float(began_at),
        float(request.get("seconds", 0.0)),
        float(request.get("queued_s", 0.0)),
        request.get("worker") or "",
    )


def _to_json(span: TracedSpan) -> Json:
    told: Json = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "name": span.name,
        "kind": span.kind,
        "startTimeUnixNano": str(span.began_at),
        "endTimeUnixNano": str(span.ended_at),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id is not None:
        told["parentSpanId"] = f"{span.parent_id:016x}"
    if span.status:
        told["status"] = {"code": span.status}
    if span.link is not None:
        trace_id, span_id, flags = span.link
        told["links"] = [{"traceId": f"{trace_id:032x}", "spanId": f"{span_id:016x}", "flags": flags}]
    return told


def _attributes(values: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: object) -> Json:
    match value:
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
        case _:
            return {"stringValue": value}
