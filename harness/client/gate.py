"""The gate of a session server, from the outside: drain, pause, renew, resume, and what it says of itself.

All verbs are idempotent, so each may be repeated after any failure of transport or gateway; a few times only, because
whoever turns a gate has a deadline of its own and a server that is gone must not use it up.

A client with a holder puts a hold of that name on the gate, which runs out unless `renew_holds` goes on beside the work
it is for: a controller that is killed keeps no gate shut. Without one its verbs are bare: the anonymous hold.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from harness.client.connections import GATE, Connections, decode
from harness.errors import HoldExpired, HoldNotFound, SessionServerError
from harness.machine.deadlines import attempt
from harness.machine.log import get_logger
from harness.sessions.gate import GateReport
from harness.types import Json
from server_patch.background import running

HOLD_TTL_S = 60.0
"""How long a gate stays shut after its controller has died."""
HOLD_NOT_RENEWED = "gate_hold_not_renewed"

_log = get_logger(__name__)

_ATTEMPTS = 3
_RENEWALS = 3  # in the time that a hold lasts
_FIRST_PAUSE_S = 0.1


class GateClient:
    """The gate of the server at `url`; `SessionServerClient.gate` makes one. Every verb raises `SessionServerError`.

    Args:
        url: Of the session server.
        connections: To it.
        holder: Name of the hold that the verbs place, renew and release; empty for bare verbs.
        ttl_s: How long the hold lasts when it is not renewed.
    """

    def __init__(self, url: str, connections: Connections, holder: str, ttl_s: float) -> None:
        self.url = url
        self.ttl_s = ttl_s
        self.is_held = False
        """The hold has been placed, and neither been released since nor been lost."""
        self.may_be_held = False
        """It has been placed, or may have been, by a verb whose answer was lost; it is renewed then."""
        self.is_lost = False
        """The hold ended before it was released: what it kept shut has been open."""
        self._lasts_until = 0.0  # monotonic seconds, from before the verb that placed or renewed it last
        self._holder = {"holder": holder} if holder else {}
        self._connections = connections

    @property
    def has_run_out(self) -> bool:
        """The hold was lost, or its time has passed since the server last answered: it may be another holder's gate."""
        return self.is_lost or (self.may_be_held and time.monotonic() > self._lasts_until)

    def under(self, holder: str, ttl_s: float) -> "GateClient":
        """The same gate, turned under the name `holder`."""
        return GateClient(self.url, self._connections, holder, ttl_s)

    async def drain(self, *, deadline_s: float) -> GateReport:
        """End every open session for good; answered when each is marked, durably."""
        return await self._place("drain", deadline_s)

    async def pause(self, *, deadline_s: float, engines: bool = False) -> GateReport:
        """Hold new work; `engines` claims the engines as well, which one holder at a time can (`engines_held`)."""
        return await self._place("pause", deadline_s, engines=engines)

    async def renew(self, *, deadline_s: float) -> GateReport:
        """Have the hold last for another `ttl_s`; it is lost when the server says that there is none."""
        lasts_until = time.monotonic() + self.ttl_s
        try:
            report = await self._ask("POST", "renew", deadline_s, self._holder | {"ttl_s": self.ttl_s})
        except SessionServerError as error:
            if error.code in (HoldExpired.code, HoldNotFound.code):
                # One that nobody knows to have been placed is not lost, unless the server says that it ran out.
                self.is_lost = self.is_lost or self.is_held or error.code == HoldExpired.code
                self.is_held = self.may_be_held = False
            raise
        self.is_held = self.may_be_held  # it may have been released meanwhile
        self._lasts_until = lasts_until
        return report

    async def resume(self, *, deadline_s: float, engines_continued: bool = False) -> GateReport:
        """Release the hold; what was held goes on unless somebody else holds it.

        `engines_continued` says that the engines which were claimed work again; else the server sees to it. Raises
        when the hold had run out: the gate has been open before.
        """
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
        """How the gate stands."""
        return await self._ask("GET", "gate", deadline_s)

    async def _ask(self, method: str, verb: str, deadline_s: float, body: Json | None = None) -> GateReport:
        repeated = AsyncRetrying(
            retry=retry_if_exception(_may_repeat),
            wait=wait_exponential(_FIRST_PAUSE_S),
            stop=stop_after_attempt(_ATTEMPTS),
            reraise=True,
        )
        # One attempt may not use up the time of the others: a server that hangs is asked again.
        ask = partial(self._connections.ask, GATE, method, f"/sessions/{verb}", body, timeout_s=deadline_s / _ATTEMPTS)
        return decode(await repeated(ask), GateReport)


def _may_repeat(error: BaseException) -> bool:
    return isinstance(error, SessionServerError) and (error.retryable or error.status >= 500)


def new_holder(work: str) -> str:
    """A name for the holds of one piece of `work`, which nobody else has."""
    return f"{work}-{secrets.token_hex(8)}"


@asynccontextmanager
async def renew_holds(gates: Sequence[GateClient]) -> AsyncIterator[None]:
    """The holds on `gates` that are placed, now or in the block, last as long as the block.

    A block that keeps the loop from running for longer than a hold lasts loses it all the same, and is told at
    `resume`. Release after the block.
    """
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
        # An error of any kind is logged and no more: it must not take the place of what the block comes to.
        error = await attempt(partial(gate.renew, deadline_s=seconds), seconds, name="renew a hold")
        if error is not None:
            _log.warning(HOLD_NOT_RENEWED, url=gate.url, is_lost=gate.is_lost, error=error)
