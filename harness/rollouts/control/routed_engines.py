"""Engines behind a `harness router`: one address for all.

    SessionManager("http://router:8080", admin_token=token, engines=["router=http://router:8080"])

Workers are listed when needed and reached directly; the router's own verbs would shut the gate under another hold.
Unreachable workers are a setup error. A router that does not answer counts as a silent engine.
"""

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.engines.remote.address import ENGINE_KEY, EngineAddress
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ScenarioError, SessionServerError
from harness.rollouts.client.connections import SessionServerAddress
from harness.rollouts.client.session_server import RoutedWorker, SessionServerClient
from harness.rollouts.control.engines import EngineServer

_E = TypeVar("_E")

_PREFIX = "router="
_LOOKS = 4  # tries to reach workers that do not answer
_LOOK_AGAIN_S = 0.5
_NEVER_HEARD = "it has never answered the router, so its engine is unknown"


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
