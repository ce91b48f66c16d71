"""The spans of a session for OpenTelemetry: session, turn and engine request, in the JSON of OTLP. Pure.

A session is a trace. Times are those of the record, ids are digests of those of the session, so the same session gives
the same spans wherever and however often they are made: a server that sends them and a reader of its record agree, and
what is sent twice is the same span. What was said is in none of them.

`TracedSession` and `TracedTurn` hold what a span needs and none of the tokens, so whoever keeps them for a while keeps
no session in memory.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import msgspec

from harness import __version__
from harness.samples.rollout import ENDED_WELL
from harness.telemetry.printable import printable
from harness.types import Json, Turn, TurnSegment

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

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?=-|$)"
)

_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
_OK, _ERROR = 1, 2
_NANOSECONDS = 1_000_000_000
_LONGEST = 1 << 64


def read_traceparent(text: str) -> str | None:
    """The part of a `traceparent` (W3C Trace Context) that names a span; None of one that names none."""
    found = _TRACEPARENT.match(text)
    return None if found is None or (text.startswith("00") and found.end() != len(text)) else found.group()


class TracedRequest(NamedTuple):
    """A request of a turn to an engine, which produced output tokens `start..end`."""

    request_id: str
    start: int
    end: int
    began_at: float | None
    """Unix seconds; None in records that do not say it, and then it has no span."""
    seconds: float
    queued_s: float
    worker: str
    """Empty of an engine on its own."""
    finish_reason: str | None

    @classmethod
    def of(cls, segment: TurnSegment) -> Self:
        """The request of a turn in memory."""
        return cls(
            segment.request_id,
            segment.start,
            segment.end,
            segment.began_at,
            segment.seconds,
            segment.queued_s,
            segment.worker,
            str(segment.finish_reason),
        )


class TracedTurn(NamedTuple):
    """A turn with its outcome; times are Unix seconds."""

    session_id: str
    turn: int
    """Its index."""
    parent: int | None
    status: str
    end: str
    attempts: int
    held_s: float
    """At the gate, before its admission too."""
    error_code: str | None
    prompt_length: int
    output_length: int
    versions: Sequence[tuple[str, int, int]]
    """Label of the weights, start and end of each stretch of its output."""
    requests: Sequence[TracedRequest]
    asked_at: float
    ended_at: float
    traceparent: str | None
    """Names the span of its agent in which it was asked for."""

    @classmethod
    def of(cls, session_id: str, turn: Turn) -> Self:
        """The turn of a session in memory."""
        notes = turn.notes
        error = notes.get("error")
        return cls(
            session_id,
            turn.index,
            turn.parent,
            str(turn.status),
            str(turn.end),
            turn.attempts,
            float(notes.get("held_before_s", 0.0)) + float(notes.get("held_s", 0.0)),
            None if error is None else error.get("code"),
            turn.prompt_length,
            int(turn.output_ids.size),
            [(span.version, span.start, span.end) for span in turn.version_spans],
            [TracedRequest.of(segment) for segment in turn.segments],
            turn.asked_at,
            turn.ended_at,
            notes.get("client", {}).get("traceparent"),
        )

    @property
    def span_count(self) -> int:
        """How many spans it has at most."""
        return 1 + len(self.requests)

    def spans(self) -> Iterator[Json]:
        """That of the turn, then those of its requests. Raises `ValueError`, `OverflowError` of a time that is none."""
        yield self._span()
        for place, request in enumerate(self.requests):
            if request.began_at is not None:
                yield self._request_span(place, request, request.began_at)

    def _span(self) -> Json:
        attributes = {
            "session.id": self.session_id,
            "harness.turn.index": self.turn,
            "harness.turn.parent": self.parent,
            "harness.turn.status": self.status,
            "harness.turn.end": self.end,
            "harness.turn.attempts": self.attempts,
            "harness.turn.held_seconds": self.held_s,
            "error.type": self.error_code,
            "gen_ai.usage.input_tokens": self.prompt_length,
            "gen_ai.usage.output_tokens": self.output_length,
            "harness.weight_versions": [label for label, _, _ in self.versions],
        }
        name, times = ("turn", self.turn), (self.asked_at, self.ended_at)
        status = _OK if self.error_code is None else _ERROR
        span = _span(self.session_id, name, ("session",), times, attributes, kind=_SERVER, status=status)
        caller = _TRACEPARENT.match(self.traceparent or "")
        if caller is not None:
            flags = int(caller["flags"], 16)
            span["links"] = [{"traceId": caller["trace"], "spanId": caller["span"], "flags": flags}]
        return span

    def _request_span(self, place: int, request: TracedRequest, began_at: float) -> Json:
        attributes = {
            "harness.request.id": request.request_id,
            "harness.request.worker": request.worker or None,
            "harness.request.queued_seconds": request.queued_s,
            "harness.request.finish_reason": request.finish_reason,
            "gen_ai.usage.output_tokens": request.end - request.start,
            "harness.weight_versions": [
                label for label, start, end in self.versions if start < request.end and end > request.start
            ],
        }
        name, times = ("engine request", self.turn, place), (began_at, began_at + request.seconds)
        return _span(self.session_id, name, ("turn", self.turn), times, attributes, kind=_CLIENT, status=None)


class TracedSession(NamedTuple):
    """A session with turns; what a run knows of its rollout is None where nobody does."""

    session_id: str
    turns: int
    lasted: tuple[float, float]
    """Unix seconds at which its first call came and its last turn ended."""
    scenario: str | None = None
    rollout: int | None = None
    outcome: str | None = None
    cause: str | None = None
    reward: float | None = None

    @property
    def span_count(self) -> int:
        """One: turns have their own."""
        return 1

    def spans(self) -> Iterator[Json]:
        """The span of the session, which those of its turns are below. Raises `ValueError`, `OverflowError`."""
        attributes = {
            "harness.scenario": self.scenario,
            "harness.rollout": self.rollout,
            "harness.outcome": self.outcome,
            "harness.cause": self.cause,
            "harness.reward": self.reward,
            "harness.turns": self.turns,
            "session.id": self.session_id,
        }
        status = None if self.outcome is None else _OK if self.outcome in ENDED_WELL else _ERROR
        yield _span(self.session_id, ("session",), None, self.lasted, attributes, kind=_INTERNAL, status=status)


def write_request(spans: Sequence[bytes]) -> bytes:
    """The request of OTLP with `spans`, each of which is JSON."""
    return b"".join((_HEAD, b",".join(spans), _TAIL))


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
        "endTimeUnixNano": _nanoseconds(max(times)),  # where its clock was set back
        "attributes": _attributes(attributes),
    }
    if parent is not None:
        span["parentSpanId"] = _digest(8, trace, *parent)
    if status is not None:
        span["status"] = {"code": status}
    return span


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


_RESOURCE = msgspec.json.encode(
    {"attributes": _attributes({"service.name": "harness", "service.version": __version__})}
)
_HEAD = b'{"resourceSpans":[{"resource":' + _RESOURCE + b',"scopeSpans":[{"scope":{"name":"harness"},"spans":['
_TAIL = b"]}]}]}"
