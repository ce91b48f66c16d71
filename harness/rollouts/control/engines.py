"""Control of an engine: end all requests, check for a pause, continue.

    SGLang   POST /abort_request  {"abort_all": true}
    vLLM     POST /abort_requests {}                     in dev mode only

Neither reports what it ended; session servers know what still runs. A worker of unknown kind is tried as each.

`router=URL` stands for the engines behind a `harness router`. They are listed when needed and reached directly; the
router's own verbs would shut the gate under another hold. Unreachable workers are a setup error. A router that does not
answer counts as a silent engine.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from harness.engines.base import TokenProvider
from harness.engines.kinds import ControlVerb, ServerKind, server_kinds
from harness.engines.remote.address import ENGINE_KEY, EngineAddress
from harness.engines.remote.http_bodies import error_for_status, server_message
from harness.engines.remote.http_client import EngineClient, HttpCall
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ScenarioError, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import RoutedWorker, SessionServerClient

_E = TypeVar("_E")

_MISSING = frozenset({403, 404, 405})
_PREFIX = "router="
_LOOKS = 4  # tries to reach workers that do not answer
_LOOK_AGAIN_S = 0.5
_NEVER_HEARD = "it has never answered the router, so its engine is unknown"


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


@dataclass(frozen=True, slots=True)
class SilentEngine:
    """Stand-in for an unreachable engine."""

    name: str
    error: str

    async def abort_all(self, *, deadline_s: float) -> None:
        raise EngineUnavailable(self.error)


async def learn_workers(
    engines: Iterable[_E], servers: Sequence[SessionServerAddress | str], seconds: float
) -> list[_E | EngineServer | SilentEngine]:
    """Replace each `router=URL` in `engines` by its workers.

    The admin token comes from the variable in the address (`router=URL#key=VARIABLE`), else from `servers`; workers get
    `HARNESS_ENGINE_KEY`. Raises `ScenarioError` for a server that is no router or refuses the token,
    `EngineUnavailable` if no serving worker can be reached.
    """

    async def learn(engine: _E) -> Sequence[_E | EngineServer | SilentEngine]:
        if not isinstance(engine, str) or not engine.startswith(_PREFIX):
            return [engine]
        return await _workers_of(_router_at(engine.removeprefix(_PREFIX), servers), seconds)

    return [each for found in await asyncio.gather(*(learn(engine) for engine in engines)) for each in found]


def _router_at(address: str, servers: Sequence[SessionServerAddress | str]) -> SessionServerAddress:
    named = EngineAddress.parse(address)
    if named.key_variable:
        return SessionServerAddress(named.url, named.api_key(os.environ))
    known = (server for server in servers if isinstance(server, SessionServerAddress))
    token = next((server.admin_token for server in known if server.url.rstrip("/") == named.url), None)
    return SessionServerAddress(named.url, token)


async def _workers_of(address: SessionServerAddress, seconds: float) -> Sequence[EngineServer | SilentEngine]:
    loop = asyncio.get_running_loop()
    until, look_s = loop.time() + seconds, seconds / _LOOKS
    async with SessionServerClient(address) as router:
        while True:
            left_s = until - loop.time()
            try:
                listed = await router.list_routed_workers(deadline_s=max(left_s - look_s, left_s / 2))
            except SessionServerError as error:
                return [_silent(address, error)]
            look_s = min(look_s, until - loop.time())
            errors = await _unreachable([each for each in listed if each.is_serving], look_s)
            if not errors:
                return [
                    SilentEngine(each.url, _NEVER_HEARD) if each.engine is None else EngineServer(each.url, each.engine)
                    for each in listed
                ]
            # The router drops a dead worker soon, so list again while one may be dead.
            have_answered = all(isinstance(error, EngineRejected) for error in errors)  # so none of them has died
            if have_answered or loop.time() + 2 * _LOOK_AGAIN_S >= until:
                raise EngineUnavailable(
                    f"the router at {address.url} serves sessions with workers that cannot be reached from here:"
                    f" {'; '.join(error.message for error in errors)}. Give it addresses that this process can reach,"
                    f" and this process their key ({ENGINE_KEY})"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)


async def _unreachable(workers: Sequence[RoutedWorker], seconds: float) -> list[EngineError]:
    async def ask(worker: RoutedWorker) -> EngineError | None:
        try:
            await EngineServer(worker.url, worker.engine).require_answer(deadline_s=seconds)
        except EngineError as error:
            return error
        return None

    found = await asyncio.gather(*map(ask, workers))
    errors = [error for error in found if error is not None]
    return errors if len(errors) == len(found) else []  # one that answers is enough


def _silent(address: SessionServerAddress, error: SessionServerError) -> SilentEngine:
    name = f"{_PREFIX}{address.url}"
    if error.retryable or error.status >= 500:
        return SilentEngine(name, error.message)
    if error.status in (401, 403):
        raise ScenarioError(
            f"{name}: {error.message}; expected its admin token: the session server's at the same address, or"
            f" {name}#key=VARIABLE"
        ) from error
    raise ScenarioError(f"{name}: expected a harness router, which lists its workers; {error.message}") from error
