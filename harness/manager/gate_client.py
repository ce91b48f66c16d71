"""The gate of a session server, from the outside: drain, pause, resume, and what it says of itself.

All verbs are idempotent, so each may be repeated after any failure of transport or gateway; a few times only, because
whoever turns a gate has a deadline of its own and a server that is gone must not use it up.
"""

from types import TracebackType
from typing import Self

import msgspec
from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential

from harness.errors import SessionServerError
from harness.manager.session_client import SessionClient, decoded

_ATTEMPTS = 3
_PAUSES = wait_exponential(multiplier=0.1, max=1.0)


class GateReport(msgspec.Struct, frozen=True):
    """What a gate answers; the last three say what the verb touched."""

    state: str
    epoch: int
    """How often the gate has changed."""
    held: int
    """Requests that wait at it."""
    sessions: int
    """Sessions that the server holds."""
    turns_in_flight: int
    turns_held: int = 0
    """Those of the turns in flight that wait at the gate to be continued."""
    sessions_open: int = 0
    """Those of its sessions that still accept turns."""
    changed: bool = False
    sessions_closed: int = 0
    """Sessions that this drain ended."""
    released: int = 0
    """Requests that this resume let go on."""

    @property
    def turns_generating(self) -> int:
        """Turns in flight that an engine is busy with."""
        return self.turns_in_flight - self.turns_held


class SessionServerAddress(msgspec.Struct, frozen=True):
    """Where a session server is, and what opens its admin verbs."""

    url: str
    admin_token: str | None = None


class GateClient:
    """The gate of the server at `address`; a context manager. Every verb raises `SessionServerError`."""

    def __init__(self, address: SessionServerAddress | str) -> None:
        self.address = SessionServerAddress(address) if isinstance(address, str) else address
        self._client = SessionClient(self.address.url, admin_token=self.address.admin_token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._client.close()

    async def drain(self, *, deadline_s: float) -> GateReport:
        """End every open session for good; answered when each is marked, durably."""
        return await self._ask("POST", "drain", deadline_s)

    async def pause(self, *, deadline_s: float) -> GateReport:
        """Hold new work."""
        return await self._ask("POST", "pause", deadline_s)

    async def resume(self, *, deadline_s: float) -> GateReport:
        """Serve again; what was held goes on."""
        return await self._ask("POST", "resume", deadline_s)

    async def report(self, *, deadline_s: float) -> GateReport:
        """How the gate stands."""
        return await self._ask("GET", "gate", deadline_s)

    async def _ask(self, method: str, verb: str, deadline_s: float) -> GateReport:
        attempts = AsyncRetrying(
            stop=stop_after_attempt(_ATTEMPTS), wait=_PAUSES, retry=retry_if_exception(_may_repeat), reraise=True
        )
        # One attempt may not use up the time of the others: a server that hangs is asked again.
        timeout_s = deadline_s / _ATTEMPTS
        content: bytes = await attempts(self._client.attempt, method, f"/sessions/{verb}", timeout_s=timeout_s)
        return decoded(content, GateReport)


def _may_repeat(error: BaseException) -> bool:
    return isinstance(error, SessionServerError) and (error.retryable or error.status >= 500)
