"""The gate of a server at work: requests wait at it, holds are made durable and run out.

`sessions.gate` decides, this is the waiting. The change of a verb is in force at once and durable when it is answered:
a server that dies in the middle of an update comes back shut. A hold whose time is over is taken off within a second,
logged and counted. One that covered the engines stays in the store until they have been continued, so that a server
which dies in between still knows.
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
from harness.server.http.wire import HoldRequest, ReleaseRequest, RenewRequest, ttl_of
from harness.sessions.gate import Gate, GateAnswer, Hold, HoldKind, Work
from harness.sessions.hold_times import MOST_HOLD_TIMES, HoldTimes
from harness.sessions.session import Session
from harness.store.base import SessionStore
from harness.telemetry.metrics import ServerMetrics
from harness.types import Json

HOLD_PLACED = "gate_hold_placed"
HOLD_RELEASED = "gate_hold_released"
HOLD_EXPIRED = "gate_hold_expired"

_ROW = 16  # turns that begin in one round of the event loop once a gate opens
_RETRY_AFTER_S = 2
_LONGEST_LOOK_S = 1.0  # a clock that was handed in may jump while a hold is waited for

log = get_logger(__name__)


class Gatekeeper:
    """Lets work through, holds it for a bounded time, or turns it away, as the holds on its gate want it."""

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
        """By which holds run out: nobody sets it."""
        self.held_by_work: Counter[Work] = Counter()
        """Requests that wait now, by what they want."""
        self.held_by_session: Counter[str] = Counter()
        """Those of sessions, by id; one without is not in it."""
        self._store = store
        self._metrics = metrics
        self._pause_timeout_s = pause_timeout_s
        self._changed = asyncio.Event()
        self._door = asyncio.Semaphore(_ROW)
        """Those who were held go on a few at a time: thousands at once would keep every other stream silent."""

    @property
    def held(self) -> int:
        """Requests that wait now."""
        return self.held_by_work.total()

    # Holds

    def place(self, wanted: HoldRequest, kind: HoldKind, *, work: str = "") -> Hold:
        """Put a hold on the gate or renew it, in force at once; `keep` makes it durable. See `Hold`, `Gate.place`."""
        is_new = wanted.holder not in {hold.holder for hold in self.gate.holds}
        try:
            until = self.lease_clock() + ttl_of(wanted)
            hold = self.gate.place(Hold(wanted.holder, kind, until, wanted.engines, work))
        finally:
            self.look_again()  # also when it comes too late: engines may be left
        if is_new:
            log.info(HOLD_PLACED, holder=hold.holder, kind=str(kind), ttl_s=ttl_of(wanted), engines=hold.engines)
        return hold

    def renew(self, wanted: RenewRequest) -> Hold:
        """Have a hold last longer; see `Gate.renew`."""
        try:
            return self.gate.renew(wanted.holder, self.lease_clock() + ttl_of(wanted))
        except HoldExpired:
            self.look_again()  # engines may be left
            raise

    async def keep(self, hold: Hold) -> None:
        """Return when `hold` is durable, as its holder has it by now. Raises `StoreError`.

        One that has ended since it was placed does not come back.
        """
        for current in self.gate.holds:
            if current.holder == hold.holder:
                await self._store.keep_hold(replace(current, until=current.until + self._clock_was_set_by))

    async def release(self, wanted: ReleaseRequest) -> None:
        """Take a hold off the gate, in force at once and durable on return. See `Gate.release`; raises `StoreError`."""
        try:
            hold = self.gate.release(wanted.holder, engines_continued=wanted.engines_continued)
        except HoldNotFound:
            await self._store.drop_hold(wanted.holder)  # the store may have failed when it was released
            raise
        except HoldExpired:
            self.look_again()  # engines may be left
            raise
        if hold is not None:
            self.look_again()
            log.info(HOLD_RELEASED, holder=hold.holder, kind=str(hold.kind))
            await self._forget(hold)

    @property
    def _clock_was_set_by(self) -> float:
        """Seconds: the next server knows the time of day only."""
        return self.clock() - self.lease_clock()

    def mirror(self, holds: Iterable[Hold], epoch: int) -> None:
        """Stand as the gate of a front does; nothing of it is kept here, and nothing runs out but there."""
        self.gate.mirror(holds, epoch)
        self.look_again()

    async def restore(self) -> None:
        """Have the holds that a previous server left behind; those that have run out meanwhile end now."""
        self.times.restore(await self._store.load_hold_times(MOST_HOLD_TIMES))
        kept = await self._store.load_holds()
        self.gate.restore([replace(hold, until=hold.until - self._clock_was_set_by) for hold in kept])
        await self.expire()
        self.times.note(self.gate.holds, self.clock())

    async def expire(self) -> None:
        """End every hold whose time is over."""
        expired = self.gate.expire(self.lease_clock())
        if expired:
            self.look_again()
        for hold in expired:
            self._metrics.hold_expired()
            log.warning(HOLD_EXPIRED, holder=hold.holder, kind=str(hold.kind), engines_left=hold.engines)
            try:
                await self._forget(hold)
            except StoreError as error:
                # The gate is open all the same; a server that comes after finds a hold whose time is over.
                log.warning("gate_hold_not_forgotten", holder=hold.holder, error=error.message)

    async def expire_in_time(self) -> None:
        """Take holds off as they run out, for ever."""
        while True:
            await self.expire()
            next_end = min((hold.until for hold in self.gate.holds), default=None)
            changed = self._changed.wait()
            if next_end is None:
                await changed
            else:
                await within(max(0.0, min(next_end - self.lease_clock(), _LONGEST_LOOK_S)), changed)

    async def forget_left(self) -> None:
        """Note that engines which holds had left paused work again. Raises `StoreError`."""
        self._metrics.engines_woken()
        for hold in self.gate.forget_left():
            await self._forget(hold)

    async def _forget(self, hold: Hold) -> None:
        if any(other.holder == hold.holder for other in self.gate.holds):
            return  # whoever names none has placed another since: what is kept is that one
        if hold in self.gate.left:
            await self._store.keep_hold(replace(hold, until=0.0))
        else:
            await self._store.drop_hold(hold.holder)

    def report_times(self, since: float) -> Json:
        """The answer to whoever asks when holds were on the gate, from `since` on; Unix seconds."""
        return {"now": self.clock(), "holds": self.times.since(since)}

    # Requests

    def look_again(self) -> None:
        """Wake up everybody who waits for the gate or for a session behind it, once the gate has changed."""
        self.times.note(self.gate.holds, self.clock())
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once `holds()` is true, asked at every change."""
        while not holds():
            await self._changed.wait()

    async def enter(self, work: Work, client: ClientConnection, session: Session | None = None) -> None:
        """Return when `work` of `session` may go on; for one that is not open that is at once, it answers for itself.

        Raises `GateClosed` when it may not, or not in time; `ClientLeft` when nobody waits for it any more.
        """

        def answer() -> GateAnswer:
            return self.gate.answer(work, is_open=session is None or session.is_open)

        while answer() is GateAnswer.HOLD:
            self._count(work, session, 1)
            try:
                with client.held():
                    async with client.patience(self._pause_timeout_s):
                        await self.until(lambda: answer() is not GateAnswer.HOLD)
                        async with self._door:  # whatever else the loop has to do comes between one row and the next
                            await asyncio.sleep(0)
            except TimeoutError:
                raise GateClosed(
                    f"the server has been paused for more than {self._pause_timeout_s:g} s",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
            finally:
                self._count(work, session, -1)
        if answer() is GateAnswer.REFUSE:
            raise GateClosed(f"the server is {self.gate.state}; ask again later", retry_after_s=_RETRY_AFTER_S)

    def _count(self, work: Work, session: Session | None, change: int) -> None:
        """One request more or less waits."""
        self.held_by_work[work] += change
        if session is not None:
            self.held_by_session[session.session_id] += change
            if not self.held_by_session[session.session_id]:
                del self.held_by_session[session.session_id]
