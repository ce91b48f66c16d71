"""The gate of a server at work: requests wait at it, holds become durable and expire.

A verb takes effect at once and is durable when answered, so a server that dies during an update restarts with a closed
gate. Expired holds end within a second. One that covered engines stays in the store until they are resumed, so that the
next server resumes them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from harness.errors import GateClosed, HoldExpired, HoldNotFound, StoreError
from harness.machine.clock import Clock, steady
from harness.machine.deadlines import within
from harness.machine.log import get_logger
from harness.server.http.connection import ClientConnection
from harness.server.store.base import SessionStore
from harness.server.telemetry.metrics import ServerMetrics
from harness.sessions.gate import Gate, GateAnswer, Hold, HoldKind, HoldRequest, ReleaseRequest, RenewRequest, Work
from harness.sessions.hold_times import MOST_HOLD_TIMES, HoldTimes
from harness.sessions.session import Session

HOLD_PLACED = "gate_hold_placed"
HOLD_RELEASED = "gate_hold_released"
HOLD_EXPIRED = "gate_hold_expired"

_ROW = 16  # turns to start per event loop round after a gate opens
_RETRY_AFTER_S = 2
_LONGEST_LOOK_S = 1.0  # an injected clock may jump during the wait

log = get_logger(__name__)


class Gatekeeper:
    """Admits, delays or refuses work according to the holds."""

    def __init__(
        self,
        store: SessionStore,
        metrics: ServerMetrics,
        *,
        pause_timeout_s: float,
        clock: Clock = time.time,
        lease_clock: Clock | None = None,
    ) -> None:
        self.gate = Gate()
        self.times = HoldTimes()
        self.clock = clock
        self.lease_clock = lease_clock or steady(clock)
        """Clock for the expiry of holds, immune to clock changes."""
        self.held_by_work: Counter[Work] = Counter()
        """Waiting requests by kind of work."""
        self.held_by_session: Counter[str] = Counter()
        """Waiting requests by session id."""
        self._store = store
        self._metrics = metrics
        self._pause_timeout_s = pause_timeout_s
        self._changed = asyncio.Event()
        self._door = asyncio.Semaphore(_ROW)
        """Releases a few requests at a time. Thousands at once would stall all streams."""

    @property
    def held(self) -> int:
        return self.held_by_work.total()

    # Holds

    def place(self, wanted: HoldRequest, kind: HoldKind, *, work: str = "") -> Hold:
        """Place or renew a hold; `keep` makes it durable. See `Gate.place`."""
        is_new = wanted.holder not in {hold.holder for hold in self.gate.holds}
        try:
            until = self.lease_clock() + wanted.lasts_s
            hold = self.gate.place(Hold(wanted.holder, kind, until, wanted.engines, work))
        finally:
            self.look_again()  # also after an error: engines may be left paused
        if is_new:
            log.info(HOLD_PLACED, holder=hold.holder, kind=str(kind), ttl_s=wanted.lasts_s, engines=hold.engines)
        return hold

    def renew(self, wanted: RenewRequest) -> Hold:
        """Extend a hold; see `Gate.renew`."""
        try:
            return self.gate.renew(wanted.holder, self.lease_clock() + wanted.lasts_s)
        except HoldExpired:
            self.look_again()  # engines may be left paused
            raise

    async def keep(self, hold: Hold) -> None:
        """Store the current state of `hold`, unless it ended. Raises `StoreError`."""
        for current in self.gate.holds:
            if current.holder == hold.holder:
                await self._store.keep_hold(replace(current, until=current.until + self._clock_was_set_by))

    async def release(self, wanted: ReleaseRequest) -> None:
        """Release a hold; durable on return. See `Gate.release`; raises `StoreError`."""
        try:
            hold = self.gate.release(wanted.holder, engines_continued=wanted.engines_continued)
        except HoldNotFound:
            await self._store.drop_hold(wanted.holder)  # the store may have failed at the release
            raise
        except HoldExpired:
            self.look_again()  # engines may be left paused
            raise
        if hold is not None:
            self.look_again()
            log.info(HOLD_RELEASED, holder=hold.holder, kind=str(hold.kind))
            await self._forget(hold)

    @property
    def _clock_was_set_by(self) -> float:
        # The store keeps times of day, because a lease clock means nothing to the next server.
        return self.clock() - self.lease_clock()

    def mirror(self, holds: Iterable[Hold], epoch: int) -> None:
        """Copy the gate of a front, which stores and expires the holds."""
        self.gate.mirror(holds, epoch)
        self.look_again()

    async def restore(self) -> None:
        """Load the holds of a previous server, and expire old ones."""
        self.times.restore(await self._store.load_hold_times(MOST_HOLD_TIMES))
        kept = await self._store.load_holds()
        self.gate.restore([replace(hold, until=hold.until - self._clock_was_set_by) for hold in kept])
        await self.expire()
        self.times.note(self.gate.holds, self.clock())

    async def expire(self) -> None:
        expired = self.gate.expire(self.lease_clock())
        if expired:
            self.look_again()
        for hold in expired:
            self._metrics.holds_expired.inc()
            log.warning(HOLD_EXPIRED, holder=hold.holder, kind=str(hold.kind), engines_left=hold.engines)
            try:
                await self._forget(hold)
            except StoreError as error:
                # The gate is open anyway. The next server finds an expired hold.
                log.warning("gate_hold_not_forgotten", holder=hold.holder, error=error.message)

    async def expire_in_time(self) -> None:
        """End holds as they expire, forever."""
        while True:
            await self.expire()
            next_end = min((hold.until for hold in self.gate.holds), default=None)
            changed = self._changed.wait()
            if next_end is None:
                await changed
            else:
                await within(max(0.0, min(next_end - self.lease_clock(), _LONGEST_LOOK_S)), changed)

    async def forget_left(self) -> None:
        """Record that left engines work again. Raises `StoreError`."""
        self._metrics.engines_woken.inc()
        for hold in self.gate.forget_left():
            await self._forget(hold)

    async def _forget(self, hold: Hold) -> None:
        if any(other.holder == hold.holder for other in self.gate.holds):
            return  # the anonymous holder has placed another one since
        if hold in self.gate.left:
            await self._store.keep_hold(replace(hold, until=0.0))
        else:
            await self._store.drop_hold(hold.holder)

    # Requests

    def look_again(self) -> None:
        """Wake every task that waits for the gate or a session behind it."""
        self.times.note(self.gate.holds, self.clock())
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    async def enter(self, work: Work, client: ClientConnection, session: Session | None = None) -> None:
        """Return when `work` may continue, at once for a closed session. Raises `GateClosed` or `ClientLeft`."""

        def answer() -> GateAnswer:
            return self.gate.answer(work, is_open=session is None or session.is_open)

        while answer() is GateAnswer.HOLD:
            self._count(work, session, 1)
            try:
                with client.held(), client.patience(self._pause_timeout_s):
                    await self.until(lambda: answer() is not GateAnswer.HOLD)
                    async with self._door:  # other work of the loop runs between rows
                        await asyncio.sleep(0)
            except TimeoutError:
                raise GateClosed(
                    f"the server has been paused for more than {self._pause_timeout_s:g} s",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
            finally:
                self._count(work, session, -1)
        if answer() is GateAnswer.REFUSE:
            raise GateClosed(f"the server is {self.gate.state}; retry later", retry_after_s=_RETRY_AFTER_S)

    def _count(self, work: Work, session: Session | None, change: int) -> None:
        self.held_by_work[work] += change
        if session is not None:
            self.held_by_session[session.session_id] += change
            if not self.held_by_session[session.session_id]:
                del self.held_by_session[session.session_id]
