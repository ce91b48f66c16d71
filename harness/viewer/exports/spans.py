"""The spans of a run for OpenTelemetry: session, turn and engine request, in the JSON of OTLP.

A session is a trace. Times are those of the record, ids are digests of those of the run, so the same run gives the same
spans wherever they are made. What was said is in none of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from harness import __version__
from harness.samples.rollout import ENDED_WELL
from harness.telemetry.printable import printable
from harness.types import Json
from harness.viewer.damage import say_missing
from harness.viewer.look import look_at, look_into
from harness.viewer.run_view import SessionLine
from harness.viewer.session_view import SessionView, TurnView

SPANS_FILE = "traces.jsonl"

ATTRIBUTES: Mapping[str, str] = {
    "harness.scenario": "session: its scenario",
    "harness.rollout": "session: the number of its rollout",
    "harness.outcome": "session: how the rollout ended",
    "harness.cause": "session: who is to blame",
    "harness.reward": "session: its reward",
    "harness.turns": "session: its turns",
    "session.id": "session, turn: the session's id",
    "harness.turn.index": "turn: its index",
    "harness.turn.parent": "turn: the index of the turn that it extends",
    "harness.turn.status": "turn: its status",
    "harness.turn.end": "turn: why it ended",
    "harness.turn.attempts": "turn: how many times it was in flight",
    "harness.turn.held_seconds": "turn: seconds at the gate",
    "error.type": "turn: the code of the error that had a part in its end",
    "gen_ai.usage.input_tokens": "turn: tokens of its prompt",
    "gen_ai.usage.output_tokens": "turn, request: sampled tokens of the output",
    "harness.weight_versions": "turn, request: labels of the weights that sampled it, in order",
    "harness.request.id": "request: its id at the engine",
    "harness.request.worker": "request: the worker of a pool that answered",
    "harness.request.queued_seconds": "request: seconds in the queue of the pool",
    "harness.request.finish_reason": "request: why the engine stopped",
}
"""The attributes of spans, and of which span each is."""

_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
_OK, _ERROR = 1, 2
_NANOSECONDS = 1_000_000_000
_LONGEST = 1 << 64


def write_spans(run: Path, folder: Path, missing: list[str]) -> int:
    """Write a request of OTLP per session, a line each, to `SPANS_FILE` in `folder`; returns how many spans they have.

    What could not be had is a sentence in `missing`. Raises `RunError` of a path that is no run, `StoreError` of a bad
    store.
    """
    view = look_at(run)
    missing += view.missing
    count = 0
    with (folder / SPANS_FILE).open("wb") as file:
        for line in view.sessions:
            if line.session_id is None:
                continue
            spans: list[Json] = []
            with say_missing(f"session {line.session_id}", missing):
                spans = list(session_spans(line, look_into(run, line.session_id)))
            if spans:
                file.write(msgspec.json.encode(_export_request(spans)) + b"\n")
                count += len(spans)
    return count


def session_spans(line: SessionLine, session: SessionView) -> Iterator[Json]:
    """The spans of `session`, each before those below it; none without turns. Raises `ValueError`, `OverflowError`."""
    if not session.turns:
        return
    trace = session.session_id
    attributes = {
        "harness.scenario": line.scenario,
        "harness.rollout": line.number,
        "harness.outcome": line.outcome,
        "harness.cause": line.cause,
        "harness.reward": line.reward,
        "harness.turns": len(session.turns),
        "session.id": trace,
    }
    status = None if line.outcome is None else _OK if line.outcome in ENDED_WELL else _ERROR
    times = min(map(_arrival, session.turns)), max(map(_end, session.turns))
    yield _span(trace, ("session",), None, times, attributes, kind=_INTERNAL, status=status)
    for turn in session.turns:
        yield _turn_span(trace, turn)
        for place, request in enumerate(turn.requests):
            if request.get("began_at") is not None:
                yield _request_span(trace, turn, place)


def _turn_span(trace: str, turn: TurnView) -> Json:
    attributes = {
        "session.id": trace,
        "harness.turn.index": turn.index,
        "harness.turn.parent": turn.parent,
        "harness.turn.status": turn.status,
        "harness.turn.end": turn.end,
        "harness.turn.attempts": turn.attempts,
        "harness.turn.held_seconds": turn.held_before_s + turn.held_s,
        "error.type": None if turn.error is None else turn.error.get("code"),
        "gen_ai.usage.input_tokens": turn.prompt_length,
        "gen_ai.usage.output_tokens": turn.output_length,
        "harness.weight_versions": [str(each["version"]) for each in turn.versions],
    }
    name = ("turn", turn.index)
    status = _OK if turn.error is None else _ERROR
    return _span(trace, name, ("session",), (_arrival(turn), _end(turn)), attributes, kind=_SERVER, status=status)


def _request_span(trace: str, turn: TurnView, place: int) -> Json:
    request = turn.requests[place]
    start, end = int(request["start"]), int(request["end"])
    attributes = {
        "harness.request.id": request["request_id"],
        "harness.request.worker": request.get("worker") or None,
        "harness.request.queued_seconds": float(request.get("queued_s", 0.0)),
        "harness.request.finish_reason": request.get("finish_reason"),
        "gen_ai.usage.output_tokens": end - start,
        "harness.weight_versions": [
            str(each["version"]) for each in turn.versions if each["start"] < end and each["end"] > start
        ],
    }
    name = ("engine request", turn.index, place)
    return _span(trace, name, ("turn", turn.index), _asked(request), attributes, kind=_CLIENT, status=None)


def _arrival(turn: TurnView) -> float:
    return turn.created_at - turn.held_before_s


def _end(turn: TurnView) -> float:
    """Of one that broke off and went on, its seconds do not have those in between."""
    asked = [_asked(each)[1] for each in turn.requests if each.get("began_at") is not None]
    return max(turn.created_at + turn.seconds, *asked, _arrival(turn))


def _asked(request: Json) -> tuple[float, float]:
    began = float(request["began_at"])
    return began, began + float(request.get("seconds", 0.0))


def _span(
    trace: str,
    name: tuple[object, ...],
    parent: tuple[object, ...] | None,
    times: tuple[float, float],
    attributes: Mapping[str, object],
    *,
    kind: int,
    status: int | None,
) -> Json:
    """The span `name` of the trace, between two times; its id, like that of its parent, is made of trace and name."""
    span: Json = {
        "traceId": _digest(16, trace),
        "spanId": _digest(8, trace, *name),
        "name": name[0],
        "kind": kind,
        "startTimeUnixNano": _nanoseconds(times[0]),
        "endTimeUnixNano": _nanoseconds(times[1]),
        "attributes": _attributes(attributes),
    }
    if parent is not None:
        span["parentSpanId"] = _digest(8, trace, *parent)
    if status is not None:
        span["status"] = {"code": status}
    return span


def _export_request(spans: Sequence[Json]) -> Json:
    resource = {"attributes": _attributes({"service.name": "harness", "service.version": __version__})}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "harness"}, "spans": spans}]}]}


def _attributes(values: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in values.items() if _is_said(value)]


def _is_said(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _nanoseconds(seconds: float) -> str:
    count = int(seconds * _NANOSECONDS)
    if not 0 <= count < _LONGEST:
        raise ValueError(f"{seconds} is no time")
    return str(count)


def _value(value: object) -> Json:
    match value:
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(each) for each in value]}}
        case _:
            return {"stringValue": printable(str(value))}


def _digest(size: int, *parts: Any) -> str:
    return blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=size).hexdigest()
