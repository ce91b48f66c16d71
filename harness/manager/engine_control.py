"""Ending every request of an engine: the one control verb that an abort needs.

    SGLang   POST /abort_request  {"abort_all": true}
    vLLM     POST /abort_requests {}                     in dev mode only

Both answer at once and do not say what they ended; whether anything still runs is for the session servers to tell. A
router passes none of this on, so every worker is told directly. A worker whose kind is not known is tried in the order
of the table: a server that lacks a route answers 404 and nothing happens.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from harness.engines.base import TokenProvider
from harness.engines.http_client import EngineClient, Exchange
from harness.engines.http_errors import error_for_status, server_message
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
_MISSING = frozenset({403, 404, 405})
"""Statuses of a route that a server does not have, or has switched off."""


class EngineWorker(Protocol):
    """An engine whose requests can be ended, all at once."""

    @property
    def name(self) -> str:
        """For reports."""

    async def abort_all(self, *, deadline_s: float) -> None:
        """Tell the engine to end every request it has. Raises `EngineError` or `TimeoutError`."""


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
        client = EngineClient(self.url, self.kind or "engine", api_key=self.api_key)
        client.open()
        try:
            for kind in [self.kind] if self.kind else WorkerKind:
                if await self._is_told(client, _ABORT_ALL[kind], deadline_s):
                    return
        finally:
            await client.close()
        raise EngineRejected(
            f"{client.name} has no route that ends all requests; vLLM needs VLLM_SERVER_DEV_MODE=1 in its environment"
        )

    async def _is_told(self, client: EngineClient, verb: _Verb, deadline_s: float) -> bool:
        """Whether the server has `verb`."""
        answer = await client.ask(Exchange("POST", verb.path, deadline_s, verb.body))
        if 200 <= answer.status < 300:
            return True
        if answer.status in _MISSING:
            return False
        words = server_message(answer.content)
        raise error_for_status(answer.status, f"{client.name} answered {verb.path} with {answer.status}: {words}")


@dataclass(frozen=True, slots=True)
class EngineInProcess:
    """An engine of this process, or one that is reached through a provider of its own."""

    provider: TokenProvider
    name: str = "in process"

    async def abort_all(self, *, deadline_s: float) -> None:
        """See `EngineWorker`; the caller bounds it."""
        del deadline_s
        await self.provider.abort(None)


def as_workers(workers: Iterable[EngineWorker | str]) -> tuple[EngineWorker, ...]:
    """`workers`, where an address stands for a server whose kind is not known, and `kind=address` for one that is."""
    return tuple(_parsed(each) if isinstance(each, str) else each for each in workers)


def _parsed(text: str) -> EngineServer:
    kind, separator, url = text.partition("=")
    if separator and kind in tuple(WorkerKind):
        return EngineServer(url, WorkerKind(kind))
    return EngineServer(text)
