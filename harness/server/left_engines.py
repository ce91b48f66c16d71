"""Engines that a hold left paused are continued: a controller that died cannot do it any more.

A controller that pauses engines says so in its hold, and says when it releases it that they go on. When it does not
(it was killed, its hold ran out, an engine did not obey it), the server continues the engines it owns itself, again and
again until they obey. A hold that would pause them has to wait while that is tried, so nothing is continued under
somebody who has just paused it. Meanwhile `problem` says so, and `/health` with it.
"""

from collections.abc import Awaitable, Callable

from tenacity import AsyncRetrying, retry_if_result, wait_exponential

from harness.engines.base import TokenProvider
from harness.errors import StoreError, WeightsUnsettled
from harness.machine.deadlines import attempt
from harness.machine.log import get_logger
from harness.server.gatekeeper import Gatekeeper

ENGINES_WOKEN = "left_engines_continued"
ENGINES_NOT_WOKEN = "left_engines_not_continued"

_ATTEMPT_S = 10.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

log = get_logger(__name__)


class LeftEngines:
    """Continues the engines, by `wake`, whenever the last hold that had paused them ended without that."""

    def __init__(self, gatekeeper: Gatekeeper, wake: Callable[[], Awaitable[object]]) -> None:
        self._gatekeeper = gatekeeper
        self.wake = wake
        """Continues them once; raises why they do not go on."""
        self._error = ""

    @property
    def problem(self) -> str | None:
        """Which engines are left paused, and why; None while none is."""
        gate = self._gatekeeper.gate
        if not gate.must_wake_engines:
            return None
        by = " and ".join(repr(hold.holder) for hold in gate.left)
        return f"left paused by {by}: {self._error or 'they are being continued'}"

    async def wake_for_ever(self) -> None:
        """Continue what is left, for ever."""
        gate = self._gatekeeper.gate
        while True:
            await self._gatekeeper.until(lambda: gate.must_wake_engines)
            await AsyncRetrying(
                retry=retry_if_result(lambda has_woken: gate.must_wake_engines and not has_woken),
                wait=wait_exponential(_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            )(self._wake)

    async def _wake(self) -> bool:
        """Try once; whether the engines obeyed."""
        gate = self._gatekeeper.gate
        gate.wakers += 1
        try:
            error = await attempt(self.wake, _ATTEMPT_S, name="continue left engines")
        finally:
            gate.wakers -= 1
        if error is not None:
            self._error = error
            log.warning(ENGINES_NOT_WOKEN, error=error)
            return False
        self._error = ""
        log.warning(ENGINES_WOKEN, holders=[hold.holder for hold in gate.left])
        try:
            await self._gatekeeper.forget_left()
        except StoreError as store_error:  # a server that comes after continues them once more
            log.warning("gate_hold_not_forgotten", error=store_error.message)
        return True


async def wake_engine(engine: TokenProvider) -> None:
    """Have `engine` go on; raises why it does not. Workers whose weights nobody knows stay paused on purpose."""
    try:
        await engine.resume()
    except WeightsUnsettled:
        if not engine.workers.serving:
            raise
