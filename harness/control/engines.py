"""Ending every request of an engine: the control verb that an abort needs, and whether the engine is paused.

    SGLang   POST /abort_request  {"abort_all": true}
    vLLM     POST /abort_requests {}                     in dev mode only

Both answer at once and do not say what they ended; whether anything still runs is for the session servers to tell. A
router passes none of this on, so every worker is told directly. A worker whose kind is not known is tried in the order
of the table: a server that lacks a route answers 404 and nothing happens.
"""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from harness.engines.base import TokenProvider
from harness.engines.remote.http_client import EngineClient, Exchange
from harness.engines.remote.http_errors import error_for_status, server_message
from harness.errors import EngineRejected
from harness.types import Json


class WorkerKind(StrEnum):
    """The engines whose control verbs are known."""

    SGLANG = "sglang"
    VLLM = "vllm"


class _Verb(NamedTuple):
    path: str
    body: Json


_ABORT_ALL: Mapping[WorkerKind, _Verb] = {
    WorkerKind.SGLANG: _Verb("/abort_request", {"abort_all": True}),
    WorkerKind.VLLM: _Verb("/abort_requests", {}),
}
_CONTINUE: Mapping[WorkerKind, _Verb] = {
    WorkerKind.SGLANG: _Verb("/continue_generation", {}),
    WorkerKind.VLLM: _Verb("/resume", {}),
}
_MISSING = frozenset({403, 404, 405})
"""Statuses of a route that a server does not have, or has switched off."""


@runtime_checkable
class EngineWorker(Protocol):
    """An engine whose requests can be ended, all at once."""

    @property
    def name(self) -> str:
        """For reports."""

    async def abort_all(self, *, deadline_s: float) -> None:
        """Tell the engine to end every request it has. Raises `EngineError` or `TimeoutError`."""


@runtime_checkable
class Pausable(Protocol):
    """A worker that says whether it is paused, and can be continued."""

    async def is_paused(self, *, deadline_s: float) -> bool:
        """Whether requests wait in it; False when it does not say. Raises `EngineError` or `TimeoutError`."""

    async def resume(self, *, deadline_s: float) -> None:
        """Sample again. Raises `EngineError` or `TimeoutError`."""


class _PausedAnswer(msgspec.Struct):
    is_paused: bool


@dataclass(frozen=True, slots=True)
class EngineServer:
    """An engine server over HTTP."""

    url: str
    kind: WorkerKind | None = None
    """None: found out by asking."""
    api_key: str = field(default="", repr=False)
    """For a server whose address names no key of its own; empty takes that of the environment."""

    @property
    def name(self) -> str:
        """Its address."""
        return self.url

    async def abort_all(self, *, deadline_s: float) -> None:
        """See `EngineWorker`."""
        async with self._connect() as client:
            if not await self._is_done(client, _ABORT_ALL, deadline_s):
                raise EngineRejected(
                    f"{client.name} has no route that ends all requests; vLLM needs VLLM_SERVER_DEV_MODE=1 in its"
                    " environment"
                )

    async def is_paused(self, *, deadline_s: float) -> bool:
        """See `Pausable`. vLLM says so in dev mode; SGLang is not ready while it is paused."""
        async with self._connect() as client:
            if self.kind is not WorkerKind.SGLANG:
                said = await client.ask(Exchange("GET", "/is_paused", deadline_s))
                if said.status == HTTPStatus.OK:
                    with suppress(msgspec.DecodeError):
                        return msgspec.json.decode(said.content, type=_PausedAnswer).is_paused
            if self.kind is WorkerKind.VLLM:
                return False
            ready = await client.ask(Exchange("GET", "/ready", deadline_s))
            return ready.status == HTTPStatus.SERVICE_UNAVAILABLE

    async def resume(self, *, deadline_s: float) -> None:
        """See `Pausable`."""
        async with self._connect() as client:
            if not await self._is_done(client, _CONTINUE, deadline_s):
                raise EngineRejected(f"{client.name} has no route that continues it")

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[EngineClient]:
        client = EngineClient(self.url, self.kind or "engine", api_key=self.api_key)
        client.open()
        try:
            yield client
        finally:
            await client.close()

    async def _is_done(self, client: EngineClient, verbs: Mapping[WorkerKind, _Verb], deadline_s: float) -> bool:
        """Whether the server has one of `verbs`, by its kind where that is known."""
        for kind in [self.kind] if self.kind else WorkerKind:
            path, body = verbs[kind]
            answer = await client.ask(Exchange("POST", path, deadline_s, body))
            if 200 <= answer.status < 300:
                return True
            if answer.status not in _MISSING:
                words = server_message(answer.content)
                raise error_for_status(answer.status, f"{client.name} answered {path} with {answer.status}: {words}")
        return False


@dataclass(frozen=True, slots=True)
class EngineInProcess:
    """An engine of this process, or one that is reached through a provider of its own."""

    provider: TokenProvider
    name: str = "in process"

    async def abort_all(self, *, deadline_s: float) -> None:
        """See `EngineWorker`; the caller bounds it."""
        del deadline_s
        await self.provider.abort(None)

    async def is_paused(self, *, deadline_s: float) -> bool:
        """See `Pausable`; the caller bounds it."""
        del deadline_s
        return (await self.provider.health()).paused

    async def resume(self, *, deadline_s: float) -> None:
        """See `Pausable`; the caller bounds it."""
        del deadline_s
        await self.provider.resume()


def as_workers(engines: Iterable[TokenProvider | EngineWorker | str]) -> tuple[EngineWorker, ...]:
    """`engines` as workers.

    An address stands for a server whose kind is not known, `kind=address` for one that is, a provider for the engine
    behind it.
    """

    def worker(engine: TokenProvider | EngineWorker | str) -> EngineWorker:
        match engine:
            case str():
                kind, separator, url = engine.partition("=")
                is_known = separator and kind in tuple(WorkerKind)
                return EngineServer(url, WorkerKind(kind)) if is_known else EngineServer(engine)
            case EngineWorker():
                return engine
            case _:
                return EngineInProcess(engine)

    return tuple(map(worker, engines))
