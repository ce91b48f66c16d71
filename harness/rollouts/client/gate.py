"""A session server's gate: drain, pause, renew, resume, report.

All verbs are idempotent and retried a few times. A named hold expires unless `renew_holds` runs, so a killed controller
keeps no gate shut.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from harness.errors import HoldExpired, HoldNotFound, SessionServerError
from harness.machine.deadlines import attempt
from harness.machine.log import get_logger
from harness.rollouts.client.connections import GATE, Connections, decode
from harness.sessions.gate import GateReport
from harness.types import Json
from server_patch.background import running

HOLD_TTL_S = 60.0
"""Time that a gate outlasts its controller."""
HOLD_NOT_RENEWED = "gate_hold_not_renewed"

_log = get_logger(__name__)

_ATTEMPTS = 3
_RENEWALS = 3  # in the time that a hold lasts
_FIRST_PAUSE_S = 0.1


class GateClient:
    """The gate of the server at `url`. Verbs raise `SessionServerError`. An empty `holder` is the anonymous hold."""

    def __init__(self, url: str, connections: Connections, holder: str, ttl_s: float) -> None:
        self.url = url
        self.ttl_s = ttl_s
        self.is_held = False
        """True while the hold is placed."""
        self.may_be_held = False
        """True if the hold is or may be placed."""
        self.is_lost = False
        """True if the hold ended before its release."""
        self._lasts_until = 0.0  # monotonic seconds, from before the verb that placed or renewed it last
        self._holder = {"holder": holder} if holder else {}
        self._connections = connections

    @property
    def has_run_out(self) -> bool:
        """True if the hold was lost, or may have expired."""
        return self.is_lost or (self.may_be_held and time.monotonic() > self._lasts_until)

    def under(self, holder: str, ttl_s: float) -> "GateClient":
        """Return the same gate under another holder."""
        return GateClient(self.url, self._connections, holder, ttl_s)

    async def drain(self, *, deadline_s: float) -> GateReport:
        """End every open session for good; answered when durable."""
        return await self._place("drain", deadline_s)

    async def pause(self, *, deadline_s: float, engines: bool = False) -> GateReport:
        """Hold new work. One holder at a time may claim the `engines` (`engines_held`)."""
        return await self._place("pause", deadline_s, engines=engines)

    async def renew(self, *, deadline_s: float) -> GateReport:
        lasts_until = time.monotonic() + self.ttl_s
        try:
            report = await self._ask("POST", "renew", deadline_s, self._holder | {"ttl_s": self.ttl_s})
        except SessionServerError as error:
            if error.code in (HoldExpired.code, HoldNotFound.code):
                # A hold that may never have been placed is not lost, unless the server reports that it expired.
                self.is_lost = self.is_lost or self.is_held or error.code == HoldExpired.code
                self.is_held = self.may_be_held = False
            raise
        self.is_held = self.may_be_held  # it may have been released meanwhile
        self._lasts_until = lasts_until
        return report

    async def resume(self, *, deadline_s: float, engines_continued: bool = False) -> GateReport:
        """Release the hold; raises if expired. The server continues claimed engines unless `engines_continued`."""
        self.is_held = self.may_be_held = False
        body = self._holder | {"engines_continued": engines_continued} if self._holder else None
        try:
            return await self._ask("POST", "resume", deadline_s, body)
        except SessionServerError as error:
            if error.code != HoldNotFound.code:
                raise
        return await self.report(deadline_s=deadline_s)  # never placed, or released by an attempt whose answer was lost

    async def _place(self, verb: str, deadline_s: float, *, engines: bool = False) -> GateReport:
        body = self._holder | {"ttl_s": self.ttl_s, "engines": engines} if self._holder else None
        self.may_be_held = bool(self._holder)
        self._lasts_until = time.monotonic() + self.ttl_s
        report = await self._ask("POST", verb, deadline_s, body)
        self.is_held = self.may_be_held = bool(self._holder)
        return report

    async def report(self, *, deadline_s: float) -> GateReport:
        return await self._ask("GET", "gate", deadline_s)

    async def _ask(self, method: str, verb: str, deadline_s: float, body: Json | None = None) -> GateReport:
        repeated = AsyncRetrying(
            retry=retry_if_exception(_may_repeat),
            wait=wait_exponential(_FIRST_PAUSE_S),
            stop=stop_after_attempt(_ATTEMPTS),
            reraise=True,
        )
        # Attempts share the deadline equally, so that a server that hangs is asked again.
        ask = partial(self._connections.ask, GATE, method, f"/sessions/{verb}", body, timeout_s=deadline_s / _ATTEMPTS)
        return decode(await repeated(ask), GateReport)


def _may_repeat(error: BaseException) -> bool:
    return isinstance(error, SessionServerError) and (error.retryable or error.status >= 500)


def new_holder(work: str) -> str:
    return f"{work}-{secrets.token_hex(8)}"


@asynccontextmanager
async def renew_holds(gates: Sequence[GateClient]) -> AsyncIterator[None]:
    """Renew the holds on `gates` within the block. One that stalls the event loop loses them; `resume` then raises."""
    async with AsyncExitStack() as stack:
        for gate in gates:
            await stack.enter_async_context(running(_renew(gate)))
        yield


async def _renew(gate: GateClient) -> None:
    seconds = gate.ttl_s / _RENEWALS
    while True:
        await asyncio.sleep(seconds)
        if not gate.may_be_held:
            continue
        # Only log an error: it must not replace the result of the block.
        error = await attempt(partial(gate.renew, deadline_s=seconds), seconds, name="renew a hold")
        if error is not None:
            _log.warning(HOLD_NOT_RENEWED, url=gate.url, is_lost=gate.is_lost, error=error)
