"""Holding requests at the gate: the waiting that `sessions.gate` decides about."""

import asyncio
from collections import Counter

from harness.errors import GateClosed
from harness.server.connection import ClientConnection
from harness.sessions.gate import Gate, GateState, Verdict, Work

_RETRY_AFTER_S = 2


class Gatekeeper:
    """Lets work through, holds it for a bounded time, or turns it away."""

    def __init__(self, *, pause_timeout_s: float) -> None:
        self.gate = Gate()
        self.held_by_work: Counter[Work] = Counter()
        """Requests that wait now, by what they want."""
        self._pause_timeout_s = pause_timeout_s
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        """Requests that wait now."""
        return self.held_by_work.total()

    def turn_to(self, state: GateState) -> bool:
        """Change the gate and wake up everybody who waits; False when it stood there already."""
        changed = self.gate.turn_to(state)
        if changed:
            self._changed.set()
            self._changed = asyncio.Event()
        return changed

    async def enter(self, work: Work, client: ClientConnection) -> None:
        """Return when `work` may go on.

        Raises `GateClosed` when it may not, or not in time; `ClientLeft` when nobody waits for it any more.
        """
        match self.gate.verdict(work):
            case Verdict.SERVE:
                return
            case Verdict.HOLD:
                await self._hold(work, client)
            case Verdict.REFUSE:
                raise GateClosed(f"the server is {self.gate.state}; ask again later", retry_after_s=_RETRY_AFTER_S)

    async def _hold(self, work: Work, client: ClientConnection) -> None:
        self.held_by_work[work] += 1
        try:
            async with client.patience(), asyncio.timeout(self._pause_timeout_s):
                while self.gate.verdict(work) is Verdict.HOLD:
                    await self._changed.wait()
        except TimeoutError:
            raise GateClosed(
                f"the server has been paused for more than {self._pause_timeout_s:g} s", retry_after_s=_RETRY_AFTER_S
            ) from None
        finally:
            self.held_by_work[work] -= 1
        await self.enter(work, client)
