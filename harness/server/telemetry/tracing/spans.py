"""OpenTelemetry spans of a session: session, turn, engine request. Pure.

A session is a trace. Times come from the record and ids are digests, so a session always gives the same spans. They
hold no content.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Self

from harness._version import __version__
from harness.samples.rollout import ENDED_WELL
from harness.server.telemetry.printable import printable
from harness.types import Turn, TurnSegment

SERVICE: Mapping[str, str] = {"service.name": "harness", "service.version": __version__}
"""Attributes of the resource."""

ATTRIBUTES: Mapping[str, str] = {
    "harness.scenario": "session: its scenario",
    "harness.rollout": "session: the number of its rollout",
    "harness.outcome": "session: how the rollout ended",
    "harness.cause": "session: the party that caused a failure",
    "harness.reward": "session: its reward",
    "harness.audit.gap": "session: mean gap between engine and trainer in nats, if it was audited",
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

_NANOSECONDS = 1_000_000_000
_LONGEST = 1 << 64


def read_traceparent(text: str) -> str | None:
    """Return the part of a `traceparent` (W3C Trace Context) that names a span, or None."""
    found = _TRACEPARENT.match(text)
    return None if found is None or (text.startswith("00") and found.end() != len(text)) else found.group()


class TracedKind(IntEnum):
    """Kind of a span, as OTLP counts."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


class SpanStatus(IntEnum):
    """Status of a span, as OTLP counts."""

    UNSET = 0
    OK = 1
    ERROR = 2


class TracedSpan(NamedTuple):
    """A span; times are Unix nanoseconds."""

    trace_id: int
    span_id: int
    parent_id: int | None
    name: str
    kind: TracedKind
    began_at: int
    ended_at: int
    attributes: Mapping[str, str | int | float | Sequence[str]]
    status: SpanStatus
    link: tuple[int, int, int] | None
    """Trace, span and flags of the agent's span."""


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
    requests: Sequence[TurnSegment]
    """Requests of old records lack `began_at`, and have no span."""
    asked_at: float
    ended_at: float
    traceparent: str | None
    """Span of the agent that made the request."""

    @classmethod
    def of(cls, session_id: str, turn: Turn) -> Self:
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
            turn.segments,
            turn.asked_at,
            turn.ended_at,
            notes.client.get("traceparent"),
        )

    @property
    def span_count(self) -> int:
        return 1 + len(self.requests)

    def spans(self) -> Iterator[TracedSpan]:
        """Yield the spans of the turn and its requests. Raises `ValueError` or `OverflowError` for an invalid time."""
        yield self._span()
        for place, request in enumerate(self.requests):
            if request.began_at is not None:
                yield self._request_span(place, request, request.began_at)

    def _span(self) -> TracedSpan:
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
            "harness.weight_versions": [printable(label) for label, _, _ in self.versions],
        }
        name, times = ("turn", self.turn), (self.asked_at, self.ended_at)
        caller = _TRACEPARENT.match(self.traceparent or "")
        return _span(
            *(self.session_id, name, ("session",), times, attributes),
            kind=TracedKind.SERVER,
            status=SpanStatus.OK if self.error_code is None else SpanStatus.ERROR,
            link=caller and (int(caller["trace"], 16), int(caller["span"], 16), int(caller["flags"], 16)),
        )

    def _request_span(self, place: int, request: TurnSegment, began_at: float) -> TracedSpan:
        attributes = {
            "harness.request.id": request.request_id,
            "harness.request.worker": request.worker or None,
            "harness.request.queued_seconds": request.queued_s,
            "harness.request.finish_reason": request.finish_reason and str(request.finish_reason),
            "gen_ai.usage.output_tokens": request.end - request.start,
            "harness.weight_versions": [
                printable(label) for label, start, end in self.versions if start < request.end and end > request.start
            ],
        }
        name, times = ("engine request", self.turn, place), (began_at, began_at + request.seconds)
        return _span(self.session_id, name, ("turn", self.turn), times, attributes, kind=TracedKind.CLIENT)


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
    audit_gap: float | None = None

    @property
    def span_count(self) -> int:
        return 1

    def spans(self) -> Iterator[TracedSpan]:
        """Yield the span of the session. Raises `ValueError` or `OverflowError`."""
        attributes = {
            "harness.scenario": self.scenario,
            "harness.rollout": self.rollout,
            "harness.outcome": self.outcome,
            "harness.cause": self.cause,
            "harness.reward": self.reward,
            "harness.audit.gap": self.audit_gap,
            "harness.turns": self.turns,
            "session.id": self.session_id,
        }
        status = SpanStatus.UNSET
        if self.outcome is not None:
            status = SpanStatus.OK if self.outcome in ENDED_WELL else SpanStatus.ERROR
        yield _span(
            self.session_id, ("session",), None, self.lasted, attributes, kind=TracedKind.INTERNAL, status=status
        )


def _span(
    trace: str,
    name: tuple[Any, ...],
    parent: tuple[object, ...] | None,
    times: tuple[float, float],
    attributes: Mapping[str, Any],
    *,
    kind: TracedKind,
    status: SpanStatus = SpanStatus.UNSET,
    link: tuple[int, int, int] | None = None,
) -> TracedSpan:
    return TracedSpan(
        _digest(16, trace),
        _digest(8, trace, *name),
        None if parent is None else _digest(8, trace, *parent),
        name[0],
        kind,
        _nanoseconds(times[0]),
        _nanoseconds(max(times)),  # where its clock was set back
        {key: printable(each) if isinstance(each, str) else each for key, each in attributes.items() if _is_said(each)},
        status,
        link,
    )


def _is_said(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _nanoseconds(seconds: float) -> int:
    count = int(seconds * _NANOSECONDS)
    if not 0 <= count < _LONGEST:
        raise ValueError(f"{seconds} is not a time")
    return count


@lru_cache(1024)  # a turn names its session's span again, and a request its turn's
def _digest(size: int, *parts: object) -> int:
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=size).digest())
