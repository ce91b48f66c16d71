"""Spans on their way to a collector; the server never waits for them.

OpenTelemetry's SDK queues, batches, posts and retries, in a thread of its own. Here each span is counted once, as sent
or dropped, and the collector's failures are logged once. Ids come from the record, so spans are made without the SDK's
tracer. Imported only by servers with a collector.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from http.cookiejar import DefaultCookiePolicy
from threading import Event, Lock, Thread, get_ident
from typing import Any

import requests
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from harness.machine.deadlines import within
from harness.machine.log import get_logger
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.tracing.spans import (
    SERVICE,
    SpanStatus,
    TracedKind,
    TracedSession,
    TracedSpan,
    TracedTurn,
)

SPANS_NOT_TAKEN = "spans_not_taken"
"""Event: a collector stops taking spans."""
SPANS_TAKEN = "spans_taken_again"
"""Event: it takes spans again."""
QUEUE_LENGTH = 16_384
"""Most spans that wait."""
STOP_S = 3.0
"""Seconds for the rest when the server stops."""

_BATCH_LENGTH = 512
_EVERY_MS = 1000
_OBEY_S = 0.2  # for the SDK's thread to end, unless a request hangs
_MOST_BYTES = 1 << 16  # of an answer; a longer one is none of OTLP's
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_RESOURCE = Resource(SERVICE)
_STATUSES = {status: Status(StatusCode(status)) for status in SpanStatus}
_KINDS = {kind: SpanKind[kind.name] for kind in TracedKind}
_SCOPE = InstrumentationScope("harness")

log = get_logger(__name__)


class SpanDropReason(StrEnum):
    """Reason why spans were not sent."""

    QUEUE_FULL = "queue_full"
    """They came faster than the collector took them."""
    REFUSED = "refused"
    """The collector did not take them, after the SDK's retries."""
    STOPPED = "stopped"
    """The server stopped before the collector took them."""
    INVALID = "invalid"
    """They have an invalid time."""


class SpanSender:
    """Sender of offered spans to the collector at `url`, while the block of `sending` runs."""

    def __init__(self, url: str, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._exporter = _CountingExporter(url, metrics)
        self._processor = BatchSpanProcessor(self._exporter, QUEUE_LENGTH, _EVERY_MS, _BATCH_LENGTH)
        self._flushed = asyncio.Event()

    def hurry(self) -> None:
        """Abandon what is left, at once if the block is ending."""
        self._exporter.shutdown()
        self._flushed.set()

    def offer(self, traced: TracedTurn | TracedSession, *, is_new: bool = True) -> None:
        """Queue spans, or drop them if the queue is full. Never waits, never raises."""
        # Old turns come by the thousand and may fill only half of the queue.
        if not self._exporter.admit(traced.span_count, QUEUE_LENGTH if is_new else QUEUE_LENGTH // 2):
            return
        spans: list[ReadableSpan] = []
        try:
            spans = list(map(_readable, traced.spans()))
        except (ValueError, OverflowError):  # the clock of its machine was never set
            self._metrics.spans_dropped.labels(SpanDropReason.INVALID).inc(traced.span_count)
        self._exporter.give_back(traced.span_count - len(spans))
        for span in spans:
            self._processor.on_end(span)

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send during the block, then the rest for a bounded time."""
        try:
            yield
        finally:
            # The SDK takes up to 30 s to stop, in a thread that neither the server nor Python at its end waits for.
            flushing = Thread(target=self._flush, args=[asyncio.get_running_loop()], daemon=True)
            flushing.start()
            try:
                await within(STOP_S, self._flushed.wait())
            finally:
                self._exporter.shutdown()
                await asyncio.to_thread(flushing.join, _OBEY_S)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK's
        self._exporter.sdk_log.removeFilter(self._exporter.hear)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._flushed.set)


class _CountingExporter(SpanExporter):
    """The SDK's exporter with counters and a log of our own. The lock counts each span once, even a late one."""

    sdk_log = logging.getLogger(OTLPSpanExporter.__module__)

    def __init__(self, url: str, metrics: ServerMetrics) -> None:
        session = requests.Session()
        session.trust_env = False  # no proxy, and no password of a file
        session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        session.headers.pop("Accept-Encoding")  # a compressed answer could be a bomb
        session.stream = True
        session.hooks["response"].append(self._read)
        self._otlp = OTLPSpanExporter(url, session=session)
        self._url = url
        self._metrics = metrics
        self._lock = Lock()
        self._waiting = self._unsettled = self._rejected = 0
        self._is_failing, self._is_over = False, Event()
        self._thread: int | None = None
        self.sdk_log.addFilter(self.hear)

    def admit(self, spans: int, most: int) -> bool:
        """Count spans that are offered; those that exceed the queue of `most` as dropped."""
        with self._lock:
            if self._is_over.is_set() or self._waiting + spans > most:
                reason = SpanDropReason.STOPPED if self._is_over.is_set() else SpanDropReason.QUEUE_FULL
                self._metrics.spans_dropped.labels(reason).inc(spans)
                return False
            self._waiting += spans
            self._unsettled += spans
            return True

    def give_back(self, spans: int) -> None:
        """Take back the count of spans that were offered and do not exist."""
        with self._lock:
            self._waiting -= spans
            self._unsettled -= 0 if self._is_over.is_set() else spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._waiting -= len(spans)
        if self._is_over.is_set():
            return SpanExportResult.FAILURE
        self._thread, self._rejected = get_ident(), 0
        result = self._otlp.export(spans)
        rejected = len(spans) if result is SpanExportResult.FAILURE else min(len(spans), self._rejected)
        with self._lock:
            if self._is_over.is_set():
                return result
            self._unsettled -= len(spans)
            self._metrics.spans_dropped.labels(SpanDropReason.REFUSED).inc(rejected)
            self._metrics.spans_sent.inc(len(spans) - rejected)
        if self._is_failing and not rejected:
            self._is_failing = False
            log.info(SPANS_TAKEN, collector=self._url)
        return result

    def shutdown(self) -> None:
        with self._lock:
            if self._is_over.is_set():
                return
            self._is_over.set()
            self._metrics.spans_dropped.labels(SpanDropReason.STOPPED).inc(self._unsettled)
        self._otlp.shutdown()  # type: ignore[no-untyped-call]  # the SDK's

    def hear(self, record: logging.LogRecord) -> bool:
        """Filter the SDK's log: it has a record of each try that failed. Other exporters in the process keep theirs."""
        if record.thread != self._thread:
            return True
        if not self._is_over.is_set():
            self._metrics.span_posts_failed.inc()
            self._fail(record.getMessage())
        return False

    def _fail(self, why: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            log.warning(SPANS_NOT_TAKEN, collector=self._url, why=why)

    def _read(self, response: requests.Response, **_: Any) -> None:
        content = response.raw.read(_MOST_BYTES)
        response.close()
        response.reason = f"status {response.status_code}"  # the SDK logs it, and a collector may echo a key
        if 300 <= response.status_code < 400:  # to the SDK a success
            raise requests.TooManyRedirects(response.reason)
        with suppress(DecodeError):
            partial = ExportTraceServiceResponse.FromString(content).partial_success
            self._rejected = partial.rejected_spans
            if self._rejected:
                self._fail(f"rejected {self._rejected} spans")


def _readable(span: TracedSpan) -> ReadableSpan:
    def context(span_id: int) -> SpanContext:
        return SpanContext(span.trace_id, span_id, is_remote=False, trace_flags=_SAMPLED)

    links: Sequence[Link] = ()
    if span.link is not None:
        trace_id, span_id, flags = span.link
        links = (Link(SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))),)
    return ReadableSpan(
        span.name,
        context(span.span_id),
        None if span.parent_id is None else context(span.parent_id),
        _RESOURCE,
        span.attributes,
        links=links,
        kind=_KINDS[span.kind],
        status=_STATUSES[span.status],
        start_time=span.began_at,
        end_time=span.ended_at,
        instrumentation_scope=_SCOPE,
    )
