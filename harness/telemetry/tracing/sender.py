"""Spans on their way to a collector, beside a server that never waits for them.

What is offered goes into a queue of bounded length; what finds it full is dropped and counted. A background task takes
batches from it, one POST after the other: when there are enough spans, or when the first of them has waited for a
moment. A batch that the collector may take later is sent again, less and less often, and is given up after some
minutes; the queue fills meanwhile. When the server stops, what is left gets one more try and a few seconds in all.

A batch may arrive twice: when its answer was lost, or when the server stopped meanwhile. Spans have the ids of what
they are about, so a span that comes again is the same one.

Each change of state is logged once: that spans are not taken, for which reason, and that they are again.
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
from harness.telemetry.metrics import ServerMetrics
from harness.telemetry.tracing.collector import Answer, Collector, Verdict
from harness.telemetry.tracing.spans import TracedSession, TracedTurn, write_request
from server_patch.background import running

SPANS_NOT_TAKEN = "spans_not_taken"
"""Logged when a collector stops to take spans, or does so for another reason."""
SPANS_TAKEN = "spans_taken_again"
"""Logged when it takes them again."""

_AT_ONCE = 16  # turns made into JSON in one go: half a millisecond

log = get_logger(__name__)


class DropReason(StrEnum):
    """Why spans were not sent."""

    QUEUE_FULL = "queue_full"
    """They came faster than the collector took them, or it has taken none for a while."""
    REFUSED = "refused"
    """It will never take them: another status than those that may be asked again, or `partialSuccess`."""
    GIVEN_UP = "given_up"
    """It has failed to take them for `SendingPace.give_up_s`."""
    STOPPED = "stopped"
    """The server stopped, and it did not take them in time."""
    INVALID = "invalid"
    """A time of theirs is none."""


class SendingPace(NamedTuple):
    """How much waits, and for how long; spans are counted, times are seconds."""

    queue_length: int = 16_384
    batch_length: int = 512
    every_s: float = 1.0
    """How long the first span of a batch waits for the others."""
    first_pause_s: float = 1.0
    """Before a batch is sent again; doubles each time."""
    longest_pause_s: float = 30.0
    give_up_s: float = 300.0
    """After the first try of a batch."""
    stop_s: float = 3.0
    """For all that is left when the server stops."""


class SpanSender:
    """Sends what it is offered to `collector`, as long as the block of `sending` runs."""

    def __init__(self, collector: Collector, metrics: ServerMetrics, pace: SendingPace | None = None) -> None:
        self._collector = collector
        self._metrics = metrics
        self._pace = pace or SendingPace()
        self._queue: deque[TracedTurn | TracedSession] = deque()
        self._waiting = 0
        """Spans in the queue."""
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._batch: list[bytes] = []
        """Spans that are being sent."""
        self._trouble = ""
        self._hurries = False
        self._ending: asyncio.Timeout | None = None
        """Of what is left, while it is being sent."""

    def hurry(self) -> None:
        """Send nothing any more when the block ends, and no more of what is left if it is ending."""
        self._hurries = True
        if self._ending is not None and not self._ending.expired():
            self._ending.reschedule(0.0)

    def offer(self, traced: TracedTurn | TracedSession, *, is_new: bool = True) -> None:
        """Have the spans of `traced` sent, or drop them when the queue is full; never waits, never raises.

        What is not new, as thousands of turns in one go may be, finds the queue full when half of it is.
        """
        spans = traced.span_count
        if self._waiting + spans > (self._pace.queue_length if is_new else self._pace.queue_length // 2):
            self._drop(DropReason.QUEUE_FULL, spans)
            return
        self._queue.append(traced)
        self._waiting += spans
        self._some.set()
        if self._waiting >= self._pace.batch_length:
            self._enough.set()

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send during the block, and what is left at its end for a bounded time."""
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
                    self._drop(DropReason.STOPPED, self._waiting + len(self._batch))
                    self._queue.clear()

    async def _send_for_ever(self) -> None:
        while True:
            await self._some.wait()
            await within(self._pace.every_s, self._enough.wait())
            await self._take_batch()
            await self._send_batch()

    async def _send_rest(self) -> None:
        """Send what is left, the batch that was being sent among it, until the collector fails to take some."""
        while self._batch or self._queue:
            if not self._batch:
                await self._take_batch()
            answer = await self._post()
            if answer.verdict is Verdict.AGAIN:
                return
            self._settle(answer)

    async def _take_batch(self) -> None:
        """Make a batch of what has waited longest. Others have their turn meanwhile."""
        for taken in count(1):
            if not self._queue or len(self._batch) >= self._pace.batch_length:
                break
            traced = self._queue.popleft()
            self._waiting -= traced.span_count
            try:
                self._batch += list(map(msgspec.json.encode, traced.spans()))
            except (ValueError, OverflowError):  # the clock of its machine was never set
                self._drop(DropReason.INVALID, traced.span_count)
            if taken % _AT_ONCE == 0:
                await asyncio.sleep(0)
        if not self._queue:
            self._some.clear()
        if self._waiting < self._pace.batch_length:
            self._enough.clear()

    async def _send_batch(self) -> None:
        """Send the batch until the collector has it, will never have it, or has had time enough."""
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
            retry=retry_if_result(lambda answer: answer.verdict is Verdict.AGAIN),
            wait=rest_s,
            stop=stop_before_delay(self._pace.give_up_s),
            retry_error_callback=last_result,
        )(self._post)
        if answer.verdict is Verdict.AGAIN:
            await asyncio.sleep(max(0.0, until - loop.time()))  # the next batch is not posted before its time either
            self._drop(DropReason.GIVEN_UP, len(self._batch))
            self._batch = []
        else:
            self._settle(answer)

    async def _post(self) -> Answer:
        answer = await self._collector.post(write_request(self._batch))
        if answer.verdict is not Verdict.TAKEN:
            self._metrics.span_post_failed()
        if answer.trouble != self._trouble:
            self._trouble = answer.trouble
            if answer.trouble:
                log.warning(SPANS_NOT_TAKEN, collector=self._collector.url, why=answer.trouble, detail=answer.detail)
            else:
                log.info(SPANS_TAKEN, collector=self._collector.url)
        return answer

    def _settle(self, answer: Answer) -> None:
        """Be done with the batch, which has been answered for good."""
        spans = len(self._batch)
        rejected = spans if answer.verdict is Verdict.REFUSED else min(spans, answer.rejected)
        self._drop(DropReason.REFUSED, rejected)
        self._metrics.spans_sent(spans - rejected)
        self._batch = []

    def _drop(self, reason: DropReason, spans: int) -> None:
        if spans:
            self._metrics.spans_dropped(str(reason), spans)
