"""Spans on their way to a collector, beside a server that never waits for them.

A bounded queue drops and counts what does not fit. A background task posts batches, one at a time, when enough spans
have come or the first has waited. It retries a batch with growing pauses, for minutes. At the end the rest gets one try
within seconds. A batch may arrive twice, with the same span ids. Each change of state is logged once.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from itertools import count
from typing import NamedTuple

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_result, stop_before_delay, wait_exponential

from harness.machine.deadlines import last_result, within
from harness.machine.log import get_logger
from harness.server.telemetry.metrics import ServerMetrics
from harness.server.telemetry.tracing.collector import Answer, DeliveryVerdict, SpanCollector
from harness.server.telemetry.tracing.spans import TracedSession, TracedTurn, write_request
from server_patch.background import running

SPANS_NOT_TAKEN = "spans_not_taken"
"""Event: a collector stops taking spans, or gives another reason."""
SPANS_TAKEN = "spans_taken_again"
"""Event: it takes spans again."""

_AT_ONCE = 16  # turns made into JSON in one go: half a millisecond

log = get_logger(__name__)


class SpanDropReason(StrEnum):
    """Reason why spans were not sent."""

    QUEUE_FULL = "queue_full"
    """They came faster than the collector took them."""
    REFUSED = "refused"
    """The collector refused them for good."""
    GIVEN_UP = "given_up"
    """The collector failed to take them for `SendingPace.give_up_s`."""
    STOPPED = "stopped"
    """The server stopped before the collector took them."""
    INVALID = "invalid"
    """They have an invalid time."""


class SendingPace(NamedTuple):
    """Limits in spans and seconds."""

    queue_length: int = 16_384
    batch_length: int = 512
    every_s: float = 1.0
    """Longest wait of a batch's first span for the others."""
    first_pause_s: float = 1.0
    """Pause before the first retry; doubles each time."""
    longest_pause_s: float = 30.0
    give_up_s: float = 300.0
    """Time from a batch's first try until it is dropped."""
    stop_s: float = 3.0
    """Time for the rest when the server stops."""


class SpanSender:
    """Sender of offered spans to `collector`, while the block of `sending` runs."""

    def __init__(self, collector: SpanCollector, metrics: ServerMetrics, pace: SendingPace | None = None) -> None:
        self._collector = collector
        self._metrics = metrics
        self._pace = pace or SendingPace()
        self._queue: deque[TracedTurn | TracedSession] = deque()
        self._waiting = 0
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._batch: list[bytes] = []
        self._trouble = ""
        self._hurries = False
        self._ending: asyncio.Timeout | None = None

    def hurry(self) -> None:
        """Abandon what is left when the block ends, at once if it is ending."""
        self._hurries = True
        if self._ending is not None and not self._ending.expired():
            self._ending.reschedule(0.0)

    def offer(self, traced: TracedTurn | TracedSession, *, is_new: bool = True) -> None:
        """Queue spans, or drop them if the queue is full. Never waits, never raises."""
        # Old turns come by the thousand and may fill only half of the queue.
        spans = traced.span_count
        if self._waiting + spans > (self._pace.queue_length if is_new else self._pace.queue_length // 2):
            self._drop(SpanDropReason.QUEUE_FULL, spans)
            return
        self._queue.append(traced)
        self._waiting += spans
        self._some.set()
        if self._waiting >= self._pace.batch_length:
            self._enough.set()

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send during the block, then the rest for a bounded time."""
        async with self._collector.connect():
            try:
                async with running(self._send_for_ever()):
                    yield
            finally:
                try:
                    if not self._hurries:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(self._pace.stop_s) as self._ending:
                                await self._send_rest()
                finally:
                    self._ending = None
                    self._drop(SpanDropReason.STOPPED, self._waiting + len(self._batch))
                    self._queue.clear()

    async def _send_for_ever(self) -> None:
        while True:
            await self._some.wait()
            await within(self._pace.every_s, self._enough.wait())
            await self._take_batch()
            await self._send_batch()

    async def _send_rest(self) -> None:
        while self._batch or self._queue:
            if not self._batch:
                await self._take_batch()
            answer = await self._post()
            if answer.verdict is DeliveryVerdict.AGAIN:
                return
            self._settle(answer)

    async def _take_batch(self) -> None:
        for taken in count(1):
            if not self._queue or len(self._batch) >= self._pace.batch_length:
                break
            traced = self._queue.popleft()
            self._waiting -= traced.span_count
            try:
                self._batch += list(map(msgspec.json.encode, traced.spans()))
            except (ValueError, OverflowError):  # the clock of its machine was never set
                self._drop(SpanDropReason.INVALID, traced.span_count)
            if taken % _AT_ONCE == 0:
                await asyncio.sleep(0)
        if not self._queue:
            self._some.clear()
        if self._waiting < self._pace.batch_length:
            self._enough.clear()

    async def _send_batch(self) -> None:
        if not self._batch:
            return
        loop, first_s = asyncio.get_running_loop(), self._pace.first_pause_s
        until = loop.time() + self._pace.give_up_s
        doubling = wait_exponential(first_s, max=self._pace.longest_pause_s)

        def rest_s(state: RetryCallState) -> float:
            asked_s: float | None = last_result(state).wait_s
            if asked_s is not None:
                return max(asked_s, first_s)
            return doubling(state) * random.uniform(0.5, 1.0)  # noqa: S311  # servers that lost it come back one by one

        answer: Answer = await AsyncRetrying(
            retry=retry_if_result(lambda answer: answer.verdict is DeliveryVerdict.AGAIN),
            wait=rest_s,
            stop=stop_before_delay(self._pace.give_up_s),
            retry_error_callback=last_result,
        )(self._post)
        if answer.verdict is DeliveryVerdict.AGAIN:
            await asyncio.sleep(max(0.0, until - loop.time()))  # the next batch is not posted before its time either
            self._drop(SpanDropReason.GIVEN_UP, len(self._batch))
            self._batch = []
        else:
            self._settle(answer)

    async def _post(self) -> Answer:
        answer = await self._collector.post(write_request(self._batch))
        if answer.verdict is not DeliveryVerdict.TAKEN:
            self._metrics.span_post_failed()
        if answer.trouble != self._trouble:
            self._trouble = answer.trouble
            if answer.trouble:
                log.warning(SPANS_NOT_TAKEN, collector=self._collector.url, why=answer.trouble, detail=answer.detail)
            else:
                log.info(SPANS_TAKEN, collector=self._collector.url)
        return answer

    def _settle(self, answer: Answer) -> None:
        spans = len(self._batch)
        rejected = spans if answer.verdict is DeliveryVerdict.REFUSED else min(spans, answer.rejected)
        self._drop(SpanDropReason.REFUSED, rejected)
        self._metrics.spans_sent(spans - rejected)
        self._batch = []

    def _drop(self, reason: SpanDropReason, spans: int) -> None:
        if spans:
            self._metrics.spans_dropped(str(reason), spans)
