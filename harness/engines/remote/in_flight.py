"""The requests of this process that an engine server is working on.

A request that nobody waits for any more is taken back from the engine, so that it does not go on sampling. A request
that arrives while the engine is paused waits here: SGLang loses an abort of a request that it holds itself. An engine
that has not read a request yet loses the abort of it too, without a word; so an abort is sent when its request has
probably arrived, and again until the engine has been heard about that request.
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
_REPEATS_S = 30.0  # an engine that is silent for so long has other troubles than a lost abort


@dataclass(slots=True)
class LiveRequest:
    """One request between its arrival and its answer."""

    request_id: str
    sent_at: float | None = None
    """Loop time at which it left for the engine."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    """The engine has begun to answer, or nobody asks it any more: no abort can miss the request from then on."""
    is_answered: bool = False
    """The whole answer has come: nothing is left to take back, even if its reader does not go on to the end."""


class InFlight:
    """Keeps track of live requests.

    Args:
        take_back: Ends a request inside the engine; called for requests whose caller has gone.
        longest_hold_s: The time that a request waits here for an engine that is paused.
    """

    def __init__(self, take_back: Callable[[str], Awaitable[None]], *, longest_hold_s: float) -> None:
        self._take_back = take_back
        self._longest_hold_s = longest_hold_s
        self._live: dict[str, LiveRequest] = {}
        self._open = asyncio.Event()
        self._open.set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests that are held here."""
        return sum(live.sent_at is None for live in self._live.values())

    @property
    def is_held(self) -> bool:
        """New requests wait."""
        return not self._open.is_set()

    def hold(self) -> None:
        """Keep new requests here until `release`."""
        self._open.clear()

    def release(self) -> None:
        """Let the held requests go to the engine."""
        self._open.set()

    @asynccontextmanager
    async def track(self, request_id: str) -> AsyncIterator[LiveRequest]:
        """The request is live inside the block; leaving it without an answer of the engine takes the request back."""
        if request_id in self._live:
            raise EngineRejected(f"request id {request_id} is in use; every request needs a fresh one")
        live = self._live[request_id] = LiveRequest(request_id)
        try:
            yield live
        except (EngineUnavailable, EngineRejected):
            raise
        except BaseException:
            await self._give_up(live)
            raise
        finally:
            live.heard.set()
            del self._live[request_id]

    async def admit(self, live: LiveRequest) -> bool:
        """Wait until the request may leave for the engine; False when it was aborted before that.

        Raises `EngineUnavailable` when the engine is paused for too long.
        """
        if not self._open.is_set():  # hardly ever, and a deadline costs something
            try:
                async with asyncio.timeout(self._longest_hold_s):
                    while self.is_held and not live.aborted.is_set():
                        await await_any(self._open, live.aborted)
            except TimeoutError:
                raise EngineUnavailable(
                    f"the engine has been paused for {self._longest_hold_s:g} s; continue it, then ask again"
                ) from None
        if live.aborted.is_set():
            return False
        live.sent_at = asyncio.get_running_loop().time()
        return True

    async def tell_to_end(self, request_id: str | None) -> list[LiveRequest]:
        """The live requests that an abort of `request_id` (None: of all) is for, each marked, none twice.

        Returns when the engine's scheduler probably knows those that have left.
        """
        told = [live for key, live in self._live.items() if request_id in (None, key) and not live.aborted.is_set()]
        for live in told:
            live.aborted.set()
        await self._await_dispatch(told)
        return told

    async def tell_again(self, told: list[LiveRequest]) -> None:
        """Repeat the abort of those that the engine has not been heard about, until there are none, for 30 s."""
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
        """Take a request back; when that fails, its closed connection is what ends it in the engine."""
        if live.sent_at is None or live.aborted.is_set() or live.is_answered:
            return
        with suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_TAKE_BACK_S):
                await self._await_dispatch([live])
                await self._take_back(live.request_id)

    async def _await_dispatch(self, requests: list[LiveRequest]) -> None:
        now = asyncio.get_running_loop().time()
        latest = max((live.sent_at for live in requests if live.sent_at is not None), default=now - _DISPATCH_S)
        await asyncio.sleep(max(0.0, latest + _DISPATCH_S - now))
