"""A session server during a weight update, from the outside: its gate, its sweep, and its view of the workers.

A sweep answers when it is done, which may take minutes, so nothing here gives up before the deadline it is given; the
verbs of the gate repeat what may succeed. The sweep is not repeated: asking twice costs the time that it is meant to
save, and what it did not reach is counted anyway.
"""

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeVar

import httpx
import msgspec

from harness.client.gate import HOLD_TTL_S, GateClient, SessionServerAddress
from harness.client.sessions import decoded
from harness.errors import SessionServerError
from harness.sessions.weight_update import ExpectedWeights, LiveWeights, SweepReport, SweepRequest

_T = TypeVar("_T")


class WeightClient:
    """The server at `address`; a context manager. Every verb raises `SessionServerError`."""

    def __init__(self, address: SessionServerAddress | str, holder: str = "", ttl_s: float = HOLD_TTL_S) -> None:
        self.gate = GateClient(address, holder, ttl_s)
        self.url = self.gate.address.url
        headers = self.gate.address.headers
        self._http = httpx.AsyncClient(base_url=self.url, headers=headers, timeout=None, trust_env=False)  # noqa: S113  # each call is bounded
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.gate)
        await self._stack.enter_async_context(self._http)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def sweep(self, request: SweepRequest) -> SweepReport:
        """Score what waits for the live version; answers when that is done or its budget used up."""
        return await self._post("/sessions/sweep", request, SweepReport)

    async def expect(self, version: int) -> LiveWeights:
        """Have the server ask its workers what they serve, and fence those that do not serve `version`."""
        return await self._post("/sessions/weights", ExpectedWeights(version), LiveWeights)

    async def _post(self, path: str, body: msgspec.Struct, kind: type[_T]) -> _T:
        try:
            response = await self._http.post(path, content=msgspec.json.encode(body))
        except httpx.RequestError as error:
            raise SessionServerError(f"POST {path}: {type(error).__name__} {error}".rstrip()) from error
        if response.is_error:
            said = response.text[:500]
            raise SessionServerError(f"POST {path}: {response.status_code} {said}", status=response.status_code)
        return decoded(response.content, kind)
