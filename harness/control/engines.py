"""Ending every request of an engine: the control verb that an abort needs, and whether the engine is paused.

    SGLang   POST /abort_request  {"abort_all": true}
    vLLM     POST /abort_requests {}                     in dev mode only

Both answer at once and do not say what they ended; whether anything still runs is for the session servers to tell.
Every worker is told directly, those of a router too (`routed_engines.py`). The verbs are those of `engines.kinds`. A
worker whose kind is not known is tried in the order of that table: a server that lacks a route answers 404 and nothing
happens.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from harness.engines.base import TokenProvider
from harness.engines.kinds import ControlVerb, ServerKind, parse_kind, server_kinds
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.engines.remote.http_errors import error_for_status, server_message
from harness.errors import EngineRejected, ScenarioError

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


@dataclass(frozen=True, slots=True)
class EngineServer:
    """An engine server over HTTP."""

    url: str
    kind: str | None = None
    """A server's name in `engines.kinds`; None: found out by asking."""
    api_key: str = field(default="", repr=False)
    """For a server whose address names no key of its own; empty takes that of the environment."""

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in server_kinds():
            raise ScenarioError(f"kind: expected {', '.join(server_kinds())} or None, got {self.kind!r}")

    @property
    def name(self) -> str:
        """Its address."""
        return self.url

    async def abort_all(self, *, deadline_s: float) -> None:
        """See `EngineWorker`."""
        async with self._connect() as client:
            if not await self._is_done(client, [kind.abort_all for kind in self._kinds], deadline_s):
                raise EngineRejected(
                    f"{client.name} has no route that ends all requests; vLLM needs VLLM_SERVER_DEV_MODE=1 in its"
                    " environment"
                )

    async def is_paused(self, *, deadline_s: float) -> bool:
        """See `Pausable`."""
        async with self._connect() as client:
            for question in [kind.paused for kind in self._kinds]:
                answer = await client.ask(HttpCall("GET", question.path, deadline_s))
                said = question.read(answer.status, answer.content)
                if said is not None:
                    return said
        return False

    async def resume(self, *, deadline_s: float) -> None:
        """See `Pausable`."""
        async with self._connect() as client:
            if not await self._is_done(client, [kind.resume for kind in self._kinds], deadline_s):
                raise EngineRejected(f"{client.name} has no route that continues it")

    async def require_answer(self, *, deadline_s: float) -> None:
        """Raises `EngineError` unless the server answers, as one of its kind, and takes the key."""
        async with self._connect() as client:
            for examined in [kind.examined for kind in self._kinds if kind.examined is not None]:
                await client.get_text(examined.path, deadline_s=deadline_s)

    @property
    def _kinds(self) -> Sequence[ServerKind]:
        """Those that the server may be of."""
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
        """Whether the server has one of `verbs`."""
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
                named = parse_kind(engine)
                if named is None or named.kind.server is None or named.rest is None:
                    return EngineServer(engine)
                return EngineServer(named.rest, named.kind.name)
            case EngineWorker():
                return engine
            case _:
                return EngineInProcess(engine)

    return tuple(map(worker, engines))
