"""Resumes engines that a hold left paused, since a dead controller cannot.

A controller declares in its hold that it pauses engines, and on release that they continue. If it does not, the server
resumes its engines until they obey. Meanwhile `/health` reports `problem`.
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
    """Resumes the engines with `wake` when the last hold that paused them ended."""

    def __init__(self, gatekeeper: Gatekeeper, wake: Callable[[], Awaitable[object]]) -> None:
        self._gatekeeper = gatekeeper
        self.wake = wake
        """Resumes them once, or raises the reason."""
        self._error = ""

    @property
    def problem(self) -> str | None:
        """Holders that left engines paused, and the error, or None."""
        gate = self._gatekeeper.gate
        if not gate.must_wake_engines:
            return None
        by = " and ".join(repr(hold.holder) for hold in gate.left)
        return f"left paused by {by}: {self._error or 'they are being continued'}"

    async def wake_for_ever(self) -> None:
        """Resume engines forever."""
        gate = self._gatekeeper.gate
        while True:
            await self._gatekeeper.until(lambda: gate.must_wake_engines)
            await AsyncRetrying(
                retry=retry_if_result(lambda has_woken: gate.must_wake_engines and not has_woken),
                wait=wait_exponential(_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            )(self._wake)

    async def _wake(self) -> bool:
        gate = self._gatekeeper.gate
        # A hold that would pause engines must wait meanwhile, so this never resumes engines that a holder just paused.
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
        except StoreError as store_error:  # the next server resumes them once more
            log.warning("gate_hold_not_forgotten", error=store_error.message)
        return True


async def wake_engine(engine: TokenProvider) -> None:
    """Resume `engine`, or raise the reason. Workers with an unknown version stay paused."""
    try:
        await engine.resume()
    except WeightsUnsettled:
        if not engine.workers.serving:
            raise
