"""Control of an engine: end all requests, check for a pause, continue.

    SGLang   POST /abort_request  {"abort_all": true}
    vLLM     POST /abort_requests {}                     in dev mode only

Neither reports what it ended; session servers know what still runs. A worker of unknown kind is tried as each.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from harness.engines.base import TokenProvider
from harness.engines.kinds import ControlVerb, ServerKind, server_kinds
from harness.engines.remote.http_bodies import error_for_status, server_message
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.errors import EngineRejected, ScenarioError

_MISSING = frozenset({403, 404, 405})


@runtime_checkable
class EngineWorker(Protocol):
    """An engine whose requests can all be ended."""

    @property
    def name(self) -> str:
        """Name in reports."""

    async def abort_all(self, *, deadline_s: float) -> None:
        """End every request. Raises `EngineError` or `TimeoutError`."""


@runtime_checkable
class Pausable(Protocol):
    async def is_paused(self, *, deadline_s: float) -> bool:
        """Return True if known to be paused. Raises `EngineError` or `TimeoutError`."""

    async def resume(self, *, deadline_s: float) -> None:
        """Continue sampling. Raises `EngineError` or `TimeoutError`."""


@dataclass(frozen=True, slots=True)
class EngineServer:
    """`EngineWorker` on a server, over HTTP."""

    url: str
    kind: str | None = None
    """Name in `engines.kinds`; None tries each."""
    api_key: str = field(default="", repr=False)
    """Key if the address names none; else from the environment."""

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in server_kinds():
            raise ScenarioError(f"kind: expected {', '.join(server_kinds())} or None, got {self.kind!r}")

    @property
    def name(self) -> str:
        return self.url

    async def abort_all(self, *, deadline_s: float) -> None:
        async with self._connect() as client:
            if not await self._is_done(client, [kind.abort_all for kind in self._kinds], deadline_s):
                raise EngineRejected(
                    f"{client.name} has no route that ends all requests; vLLM needs VLLM_SERVER_DEV_MODE=1 in its"
                    " environment"
                )

    async def is_paused(self, *, deadline_s: float) -> bool:
        async with self._connect() as client:
            for question in [kind.paused for kind in self._kinds]:
                answer = await client.ask(HttpCall("GET", question.path, deadline_s))
                said = question.read(answer.status, answer.content)
                if said is not None:
                    return said
        return False

    async def resume(self, *, deadline_s: float) -> None:
        async with self._connect() as client:
            if not await self._is_done(client, [kind.resume for kind in self._kinds], deadline_s):
                raise EngineRejected(f"{client.name} has no route that continues it")

    async def require_answer(self, *, deadline_s: float) -> None:
        """Raise `EngineError` unless the server answers and accepts the key."""
        async with self._connect() as client:
            for examined in [kind.examined for kind in self._kinds if kind.examined is not None]:
                await client.get_text(examined.path, deadline_s=deadline_s)

    @property
    def _kinds(self) -> Sequence[ServerKind]:
        kinds = server_kinds()
        return list(kinds.values()) if self.kind is None else [kinds[self.kind]]

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[EngineClient]:
        client = EngineClient(self.url, self.kind or "engine", api_key=self.api_key)
        client.open()
        try:
            yield client
        finally:
            await client.close()

    async def _is_done(self, client: EngineClient, verbs: Iterable[ControlVerb], deadline_s: float) -> bool:
        for path, body in verbs:
            answer = await client.ask(HttpCall("POST", path, deadline_s, dict(body)))
            if 200 <= answer.status < 300:
                return True
            if answer.status not in _MISSING:
                words = server_message(answer.content)
                raise error_for_status(answer.status, f"{client.name} answered {path} with {answer.status}: {words}")
        return False


@dataclass(frozen=True, slots=True)
class EngineInProcess:
    """`EngineWorker` behind a provider of this process."""

    provider: TokenProvider
    name: str = "in process"

    async def abort_all(self, *, deadline_s: float) -> None:
        await self.provider.abort(None)

    async def is_paused(self, *, deadline_s: float) -> bool:
        return (await self.provider.health()).paused

    async def resume(self, *, deadline_s: float) -> None:
        await self.provider.resume()


def as_server(address: str) -> EngineServer:
    """Return the server of `KIND=URL`, or of a URL."""
    kind, is_named, url = address.partition("=")
    return EngineServer(url, kind) if is_named and kind in server_kinds() else EngineServer(address)


def as_workers(engines: Iterable[TokenProvider | EngineWorker | str]) -> tuple[EngineWorker, ...]:
    def worker(engine: TokenProvider | EngineWorker | str) -> EngineWorker:
        match engine:
            case str():
                return as_server(engine)
            case EngineWorker():
                return engine
            case _:
                return EngineInProcess(engine)

    return tuple(map(worker, engines))
