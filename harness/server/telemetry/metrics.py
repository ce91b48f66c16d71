"""The `/metrics` page, in the Prometheus text format.

Each server has its own registry, so several fit in one process. Names are fixed: dashboards depend on them. Labels have
few values, never session ids.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from harness.server.telemetry.turn_seconds import TurnSeconds
from harness.sessions.ledger import NewOutput
from harness.types import Turn

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_MOST_NAMES = 64  # of ignored parameters
_LONGEST_NAME = 100  # characters


class ServerMetrics:
    """Metrics of one session server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._turns = Counter("harness_turns", "Recorded turns", ["status"], registry=self._registry)
        self._ends = Counter("harness_turn_ends", "Why recorded turns ended", ["end"], registry=self._registry)
        self._tokens = Counter("harness_tokens_generated", "Sampled tokens", registry=self._registry)
        self._unknown_requests = Counter(
            "harness_unknown_requests", "Engine requests whose end was never heard", registry=self._registry
        )
        self._unknown_tokens = Counter(
            "harness_unknown_tokens", "The most that engines can have sampled for them unheard", registry=self._registry
        )
        self._errors = Counter("harness_errors", "Error answers", ["code"], registry=self._registry)
        self._over_limit = Counter(
            "harness_over_limit", "Requests that held more than a limit allows", ["limit"], registry=self._registry
        )
        self._ignored = Counter(
            "harness_ignored_parameters",
            "Turns that were asked for with a field of the body that is not served",
            ["dialect", "parameter"],
            registry=self._registry,
        )
        self._ignored_names: set[str] = set()
        self._heavy = Gauge(
            "harness_heavy_work", "Large requests that are read or encoded, or wait for it", registry=self._registry
        )
        self._heavy_bytes = Gauge("harness_heavy_work_bytes", "Bytes of those requests", registry=self._registry)
        self._sessions = Counter("harness_sessions_created", "Sessions created", registry=self._registry)
        self._open = Gauge("harness_sessions_open", "Sessions held", registry=self._registry)
        self._paged_out = Gauge(
            "harness_sessions_paged_out", "Those of them that only the store has", registry=self._registry
        )
        self._read_back = Histogram(
            "harness_session_read_back_seconds",
            "Seconds in which a session that was paged out was read back",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._expired = Counter(
            "harness_sessions_expired", "Sessions closed because nobody used them", registry=self._registry
        )
        self._quarantined = Gauge(
            "harness_sessions_quarantined", "Sessions that the store cannot read back", registry=self._registry
        )
        self._in_flight = Gauge("harness_turns_in_flight", "Turns without an outcome yet", registry=self._registry)
        self._repeat_terminated = Counter(
            "harness_repeat_terminated_turns", "Turns that the repeat guard ended", registry=self._registry
        )
        self._guard_active = Gauge(
            "harness_repeat_guard_active", "1 when every turn runs under the repeat guard", registry=self._registry
        )
        self._guard_disagreements = Counter(
            "harness_repeat_guard_disagreements",
            "Turns whose tokens do not bear out what the repeat guard said",
            registry=self._registry,
        )
        self._engine = Histogram(
            "harness_engine_seconds",
            "Seconds from admission to the engine's last token",
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._parts = Histogram(
            "harness_turn_seconds",
            "Seconds of a turn at the gate, in the queue of a pool, and in the engine",
            ["part"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._prompt = Counter("harness_prompt_tokens", "Tokens of the prompts of turns", registry=self._registry)
        self._cached = Counter(
            "harness_cached_prompt_tokens", "Those of them that an engine had cached", registry=self._registry
        )
        self._unknown_routes = Counter(
            "harness_unknown_routes", "Requests for no route, by the dialect", ["dialect"], registry=self._registry
        )
        self._moved = Counter(
            "harness_sessions_moved", "Sessions served by another worker than before", registry=self._registry
        )
        self._recomputed = Counter(
            "harness_prefix_tokens_recomputed", "Prompt tokens that a move took out of reach", registry=self._registry
        )
        self._workers = Gauge("harness_workers_serving", "Workers of the pool that serve", registry=self._registry)
        self._settled = Counter(
            "harness_sweep_tokens_settled", "Tokens that met their next version in a sweep", registry=self._registry
        )
        self._unmet = Counter("harness_sweep_tokens_left", "Tokens that a sweep did not reach", registry=self._registry)
        self._holds_expired = Counter(
            "harness_gate_holds_expired", "Holds on the gate that ran out", registry=self._registry
        )
        self._engines_woken = Counter(
            "harness_engines_woken", "Times the server continued engines that a hold had left", registry=self._registry
        )
        self._spans_sent = Counter("harness_spans_sent", "Spans that a collector took", registry=self._registry)
        self._spans_dropped = Counter(
            "harness_spans_dropped", "Spans that no collector got", ["reason"], registry=self._registry
        )
        self._span_posts_failed = Counter(
            "harness_span_posts_failed", "Requests with spans that a collector did not take", registry=self._registry
        )
        self._overhead = Histogram(
            "harness_overhead_seconds",
            "Seconds the server itself spent on a turn: everything but the engine",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def over_limit(self, limit: str) -> None:
        self._over_limit.labels(limit).inc()

    def parameter_ignored(self, dialect: str, name: str) -> None:
        # Clients choose names, so the number of labels is bounded.
        if name not in self._ignored_names:
            if len(self._ignored_names) < _MOST_NAMES and len(name) <= _LONGEST_NAME:
                self._ignored_names.add(name)
            else:
                name = "other"
        self._ignored.labels(dialect, name).inc()

    def heavy_work_began(self, size_bytes: int) -> None:
        """Count a large request that waits for, or is in, a worker thread."""
        self._heavy.inc()
        self._heavy_bytes.inc(size_bytes)

    def heavy_work_ended(self, size_bytes: int) -> None:
        """Count the end of a large request; thread-safe."""
        self._heavy.dec()
        self._heavy_bytes.dec(size_bytes)

    def session_created(self) -> None:
        self._sessions.inc()

    def sessions_held(self, count: int, paged_out: int) -> None:
        self._open.set(count)
        self._paged_out.set(paged_out)

    def session_read_back(self, seconds: float) -> None:
        self._read_back.observe(seconds)

    def sessions_expired(self, count: int) -> None:
        self._expired.inc(count)

    def sessions_quarantined(self, count: int) -> None:
        self._quarantined.set(count)

    def turns_in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def turn_recorded(self, turn: Turn, new: NewOutput, seconds: TurnSeconds, *, is_first: bool) -> None:
        """Record the end of an attempt, which adds `new` tokens. The prompt counts on the first one only."""
        for part, value in seconds._asdict().items():
            self._parts.labels(part).observe(value)
        if is_first:
            self._prompt.inc(turn.prompt_length)
            self._cached.inc(min(turn.prompt_length, turn.notes.cached_tokens or 0))
        self._turns.labels(str(turn.status)).inc()
        self._ends.labels(str(turn.end)).inc()
        self._repeat_terminated.inc(turn.repeat_terminated)
        self._tokens.inc(new.sampled)
        self._unknown_requests.inc(new.unknown.requests)
        self._unknown_tokens.inc(new.unknown.tokens)
        self._engine.observe(turn.seconds)

    def turn_served(self, overhead_s: float) -> None:
        self._overhead.observe(overhead_s)

    def session_moved(self, recomputed_tokens: int) -> None:
        """Count a move to a worker that lacked `recomputed_tokens` of the prefix."""
        self._moved.inc()
        self._recomputed.inc(recomputed_tokens)

    def workers_serving(self, count: int) -> None:
        self._workers.set(count)

    def guard_proven(self) -> None:
        self._guard_active.set(1)

    def guard_disagreed(self) -> None:
        self._guard_disagreements.inc()

    def sweep_ended(self, settled: int, left: int) -> None:
        self._settled.inc(settled)
        self._unmet.inc(left)

    def hold_expired(self) -> None:
        self._holds_expired.inc()

    def engines_woken(self) -> None:
        self._engines_woken.inc()

    def spans_sent(self, count: int) -> None:
        self._spans_sent.inc(count)

    def spans_dropped(self, reason: str, count: int) -> None:
        self._spans_dropped.labels(reason).inc(count)

    def span_post_failed(self) -> None:
        self._span_posts_failed.inc()

    def route_unknown(self, dialect: str) -> None:
        """Count a request for an unknown route; `dialect` may be `other`."""
        self._unknown_routes.labels(dialect).inc()

    def error_answered(self, code: str) -> None:
        self._errors.labels(code).inc()

    def render(self) -> bytes:
        """Return the page."""
        return generate_latest(self._registry)
