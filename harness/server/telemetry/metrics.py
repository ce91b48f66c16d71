"""The `/metrics` page, in the Prometheus text format.

Each server has its own registry, so several fit in one process. Names are fixed: dashboards depend on them. Labels have
few values, never session ids. Programs without a server show their figures as gauges on a local port.
"""

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple, Self

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from harness.errors import CannotListen
from harness.sessions.ledger import NewOutput
from harness.types import Turn

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_MOST_NAMES = 64  # of ignored parameters
_LONGEST_NAME = 100  # characters
_LOOPBACK = "127.0.0.1"


class TurnSeconds(NamedTuple):
    """Seconds of a turn by place, disjoint; the rest is the session server's own time."""

    gate: float
    """Held at the gate or for a weight update."""
    queue: float
    """Waiting for a worker of the pool."""
    engine: float
    """From request to answer, its own queue and transport included."""


class ServerMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        gauge = partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=self._registry)
        self._turns = cache(counter("harness_turns", "Recorded turns", ["status"]).labels)
        self._ends = cache(counter("harness_turn_ends", "Why recorded turns ended", ["end"]).labels)
        self._tokens = counter("harness_tokens_generated", "Sampled tokens")
        self._unknown_requests = counter("harness_unknown_requests", "Engine requests that never reported their end")
        self._unknown_tokens = counter(
            "harness_unknown_tokens", "Upper bound of the tokens that engines sampled for them"
        )
        self.errors = counter("harness_errors", "Error answers", ["code"])
        self.over_limit = counter("harness_over_limit", "Requests refused by a limit", ["limit"])
        self._ignored = counter(
            "harness_ignored_parameters",
            "Model calls with a body field that the server ignores",
            ["dialect", "parameter"],
        )
        self._ignored_names: set[str] = set()
        self.heavy = gauge("harness_heavy_work", "Large requests that are read or encoded, or wait for it")
        self.heavy_bytes = gauge("harness_heavy_work_bytes", "Bytes of those requests")
        self.sessions_created = counter("harness_sessions_created", "Sessions created")
        self.sessions_open = gauge("harness_sessions_open", "Sessions held")
        self.sessions_paged_out = gauge("harness_sessions_paged_out", "Sessions held that are only in the store")
        self.read_back = histogram("harness_session_read_back_seconds", "Seconds to read a paged-out session back")
        self.sessions_expired = counter("harness_sessions_expired", "Sessions closed for lack of use")
        self.sessions_quarantined = gauge("harness_sessions_quarantined", "Sessions that the store cannot read back")
        self.turns_in_flight = gauge("harness_turns_in_flight", "Turns without an outcome yet")
        self._repeat_terminated = counter("harness_repeat_terminated_turns", "Turns that the repeat guard ended")
        self.guard_active = gauge("harness_repeat_guard_active", "1 when every turn runs under the repeat guard")
        self.guard_disagreements = counter(
            "harness_repeat_guard_disagreements", "Turns whose tokens contradict the repeat guard's report"
        )
        self._engine = histogram("harness_engine_seconds", "Seconds from admission to the engine's last token")
        parts = histogram(
            "harness_turn_seconds", "Seconds of a turn at the gate, in the queue of a pool, and in the engine", ["part"]
        )
        self._parts = tuple(map(parts.labels, TurnSeconds._fields))
        self._prompt = counter("harness_prompt_tokens", "Tokens of the prompts of turns")
        self._cached = counter("harness_cached_prompt_tokens", "Prompt tokens that an engine had cached")
        self.unknown_routes = counter("harness_unknown_routes", "Requests to unknown routes, by dialect", ["dialect"])
        self._moved = counter("harness_sessions_moved", "Sessions served by another worker than before")
        self._recomputed = counter("harness_prefix_tokens_recomputed", "Cached prompt tokens lost to changes of worker")
        self._workers = gauge("harness_workers_serving", "Workers of the pool that serve")
        self.sweep_settled = counter(
            "harness_sweep_tokens_settled", "Tokens that sweeps scored under their next version"
        )
        self.sweep_left = counter("harness_sweep_tokens_left", "Tokens that sweeps left unscored")
        self.teacher_tokens = counter(
            "harness_teacher_tokens_scored", "Sampled tokens that a teacher scored", ["teacher"]
        )
        self.teacher_failures = counter(
            "harness_teacher_failures", "Times that a teacher failed to score a session", ["teacher", "code"]
        )
        self.teacher_queue = gauge(
            "harness_teacher_sessions_waiting", "Sessions to score, queued or at work", ["teacher"]
        )
        self.holds_expired = counter("harness_gate_holds_expired", "Gate holds that expired")
        self.engines_woken = counter(
            "harness_engines_woken", "Times the server continued engines that a hold left paused"
        )
        self.spans_sent = counter("harness_spans_sent", "Spans that a collector accepted")
        self.spans_dropped = counter("harness_spans_dropped", "Spans that were never delivered", ["reason"])
        self.span_posts_failed = counter("harness_span_posts_failed", "Span requests that a collector rejected")
        self.overhead = histogram(
            "harness_overhead_seconds", "Seconds the server itself spent on a turn: everything but the engine"
        )

    def parameter_ignored(self, dialect: str, name: str) -> None:
        # Clients choose names, so the number of labels is bounded.
        if name not in self._ignored_names:
            if len(self._ignored_names) < _MOST_NAMES and len(name) <= _LONGEST_NAME:
                self._ignored_names.add(name)
            else:
                name = "other"
        self._ignored.labels(dialect, name).inc()

    def turn_recorded(self, turn: Turn, new: NewOutput, seconds: TurnSeconds, *, is_first: bool) -> None:
        """Record the end of an attempt, which adds `new` tokens. The prompt counts on the first one only."""
        for part, value in zip(self._parts, seconds, strict=True):
            part.observe(value)
        if is_first:
            self._prompt.inc(turn.prompt_length)
            self._cached.inc(min(turn.prompt_length, turn.notes.cached_tokens or 0))
        self._turns(str(turn.status)).inc()
        self._ends(str(turn.end)).inc()
        self._tokens.inc(new.sampled)
        self._repeat_terminated.inc(turn.repeat_terminated)
        if new.unknown.requests:
            self._unknown_requests.inc(new.unknown.requests)
            self._unknown_tokens.inc(new.unknown.tokens)
        self._engine.observe(turn.seconds)

    def session_moved(self, recomputed_tokens: int) -> None:
        """Count a move to a worker that lacked `recomputed_tokens` of the prefix."""
        self._moved.inc()
        self._recomputed.inc(recomputed_tokens)

    def workers_serving(self, count: int) -> None:
        self._workers.set(count)

    def render(self) -> bytes:
        return generate_latest(self._registry)


def measure_turn(turn: Turn, prior: Turn | None = None) -> TurnSeconds:
    """Measure `turn`, less its interrupted attempt `prior`."""
    gate, queue, asked = _sums(turn)
    if prior is not None:
        before = _sums(prior)
        gate, queue, asked = gate - before[0], queue - before[1], asked - before[2]
    return TurnSeconds(max(0.0, gate), max(0.0, queue), max(0.0, asked - queue))


def _sums(turn: Turn) -> tuple[float, float, float]:
    held = turn.notes.held_before_s + turn.notes.held_s
    queued = sum(segment.queued_s for segment in turn.segments)
    return held, queued, sum(segment.seconds for segment in turn.segments)


class FigureGauges:
    """Context manager that serves `/metrics` on loopback; port 0 picks a free one. Raises `CannotListen`."""

    def __init__(self, port: int) -> None:
        self._wanted_port = port
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}

    def __enter__(self) -> Self:
        try:
            self._server, self._thread = start_http_server(self._wanted_port, _LOOPBACK, self._registry)
        except (OSError, OverflowError) as error:
            raise CannotListen(f"{_LOOPBACK}:{self._wanted_port}: {error}; name another port for the gauges") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def set(self, figures: Mapping[str, float]) -> None:
        """Set the current values; thread-safe."""
        for key, value in figures.items():
            if key not in self._gauges:
                name = "harness_" + re.sub(r"\W+", "_", key)
                self._gauges[key] = Gauge(name, key, registry=self._registry)
            self._gauges[key].set(value)
