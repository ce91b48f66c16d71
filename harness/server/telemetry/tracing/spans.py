"""OpenTelemetry spans of a session: session, turn, engine request, as OTLP JSON. Pure.

A session is a trace. Times come from the record and ids are digests, so a session always gives the same spans. They
hold no content. `TracedSession` and `TracedTurn` hold no tokens, so keeping them is cheap.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Self

import msgspec

from harness._version import __version__
from harness.samples.rollout import ENDED_WELL
from harness.server.telemetry.printable import printable
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
"""Attributes, and the spans that have them."""

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?P<trace>(?!0{32})[0-9a-f]{32})-(?P<span>(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?=-|$)"
)

_INTERNAL, _SERVER, _CLIENT = 1, 2, 3
_OK, _ERROR = 1, 2
_NANOSECONDS = 1_000_000_000
_LONGEST = 1 << 64


def read_traceparent(text: str) -> str | None:
    """Return the part of a `traceparent` (W3C Trace Context) that names a span, or None."""
    found = _TRACEPARENT.match(text)
    return None if found is None or (text.startswith("00") and found.end() != len(text)) else found.group()


class TracedRequest(NamedTuple):
    """An engine request, which produced output tokens `start..end`."""

    request_id: str
    start: int
    end: int
    began_at: float | None
    """Unix seconds; None in old records, which then have no span."""
    seconds: float
    queued_s: float
    worker: str
    """Empty for a single engine."""
    finish_reason: str | None

    @classmethod
    def of(cls, segment: TurnSegment) -> Self:
        """Convert a segment."""
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
    parent: int | None
    status: str
    end: str
    attempts: int
    held_s: float
    """Seconds at the gate, before and after admission."""
    error_code: str | None
    prompt_length: int
    output_length: int
    versions: Sequence[tuple[str, int, int]]
    """Weight label, start and end of each output span."""
    requests: Sequence[TracedRequest]
    asked_at: float
    ended_at: float
    traceparent: str | None
    """Span of the agent that made the request."""

    @classmethod
    def of(cls, session_id: str, turn: Turn) -> Self:
        """Convert a turn."""
        notes = turn.notes
        return cls(
            session_id,
            turn.index,
            turn.parent,
            str(turn.status),
            str(turn.end),
            notes.attempts,
            notes.held_before_s + notes.held_s,
            notes.error.get("code"),
            turn.prompt_length,
            int(turn.output_ids.size),
            [(span.version, span.start, span.end) for span in turn.version_spans],
            [TracedRequest.of(segment) for segment in turn.segments],
            turn.asked_at,
            turn.ended_at,
            notes.client.get("traceparent"),
        )

    @property
    def span_count(self) -> int:
        """Maximum number of spans."""
        return 1 + len(self.requests)

    def spans(self) -> Iterator[Json]:
        """Yield the spans of the turn and its requests. Raises `ValueError` or `OverflowError` for an invalid time."""
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
    """A session with turns; facts that only a run knows may be None."""

    session_id: str
    turns: int
    lasted: tuple[float, float]
    """Unix seconds of the first request and the last turn's end."""
    scenario: str | None = None
    rollout: int | None = None
    outcome: str | None = None
    cause: str | None = None
    reward: float | None = None

    @property
    def span_count(self) -> int:
        return 1

    def spans(self) -> Iterator[Json]:
        """Yield the span of the session. Raises `ValueError` or `OverflowError`."""
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
    """Assemble an OTLP request from JSON spans."""
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
