"""Requests of this process that an engine server is working on.

A request whose caller has gone is aborted in the engine. Requests that arrive during a pause wait here, because SGLang
loses an abort of a request that it holds itself.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from harness.errors import EngineError, EngineRejected, EngineUnavailable
from harness.machine.deadlines import await_any

_TAKE_BACK_S = 2.0
_DISPATCH_S = 0.1  # measured on SGLang: an id is known to the scheduler within milliseconds of the request
_LONGEST_PAUSE_S = 2.0
_REPEATS_S = 30.0  # a longer silence is not a lost abort


@dataclass(slots=True)
class LiveRequest:
    """Request between arrival and answer."""

    request_id: str
    sent_at: float | None = None
    """Loop time when it was sent."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the engine answers or the caller has left: aborts need no repetition."""
    is_answered: bool = False
    """True once the whole answer has arrived, even if its reader stops early."""


class InFlight:
    """Tracks live requests. `take_back` aborts one in the engine; a paused engine holds one for `longest_hold_s`."""

    def __init__(self, take_back: Callable[[str], Awaitable[None]], *, longest_hold_s: float) -> None:
        self._take_back = take_back
        self._longest_hold_s = longest_hold_s
        self._live: dict[str, LiveRequest] = {}
        self._open = asyncio.Event()
        self._open.set()

    @property
    def waiting(self) -> int:
        """Requests held here."""
        return sum(live.sent_at is None for live in self._live.values())

    @property
    def is_held(self) -> bool:
        return not self._open.is_set()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    @asynccontextmanager
    async def track(self, request_id: str) -> AsyncIterator[LiveRequest]:
        """Track the request in the block; abort it if the block ends without an answer."""
        if request_id in self._live:
            raise EngineRejected(f"request id {request_id} is in use; every request needs a fresh one")
        live = self._live[request_id] = LiveRequest(request_id)
        try:
            yield live
        # These say that the engine does not run the request; after any other exception it may.
        except (EngineUnavailable, EngineRejected):
            raise
        except BaseException:
            await self._give_up(live)
            raise
        finally:
            live.heard.set()
            del self._live[request_id]

    async def admit(self, live: LiveRequest) -> bool:
        """Wait until the request may be sent; False if aborted first. Raises `EngineUnavailable` after a long pause."""
        if not self._open.is_set():  # rare; skips the cost of a deadline
            try:
                async with asyncio.timeout(self._longest_hold_s):
                    while self.is_held and not live.aborted.is_set():
                        await await_any(self._open, live.aborted)
            except TimeoutError:
                raise EngineUnavailable(
                    f"the engine has been paused for {self._longest_hold_s:g} s; continue it, then retry"
                ) from None
        if live.aborted.is_set():
            return False
        live.sent_at = asyncio.get_running_loop().time()
        return True

    async def tell_to_end(self, request_id: str | None) -> list[LiveRequest]:
        """Mark and return the live requests that match an abort, once the scheduler probably knows them."""
        told = [live for key, live in self._live.items() if request_id in (None, key) and not live.aborted.is_set()]
        for live in told:
            live.aborted.set()
        await self._await_dispatch(told)
        return told

    async def tell_again(self, told: list[LiveRequest]) -> None:
        """Repeat unanswered aborts for at most 30 s."""
        # An engine silently loses the abort of a request that it has not read yet.
        loop = asyncio.get_running_loop()
        until, pause_s = loop.time() + _REPEATS_S, _DISPATCH_S
        while loop.time() < until:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    for live in told:
                        await live.heard.wait()
            missing = [live for live in told if live.sent_at is not None and not live.heard.is_set()]
            if not missing:
                return
            for live in missing:
                await self._take_back(live.request_id)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _give_up(self, live: LiveRequest) -> None:
        if live.sent_at is None or live.aborted.is_set() or live.is_answered:
            return
        # If the abort fails, the closed connection ends the request.
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_TAKE_BACK_S):
                await self._await_dispatch([live])
                await self._take_back(live.request_id)

    async def _await_dispatch(self, requests: list[LiveRequest]) -> None:
        now = asyncio.get_running_loop().time()
        latest = max((live.sent_at for live in requests if live.sent_at is not None), default=now - _DISPATCH_S)
        await asyncio.sleep(max(0.0, latest + _DISPATCH_S - now))
