"""The engines behind a `harness router`: one address, from which a controller learns every worker.

    SessionManager("http://router:8080", admin_token=token, engines=["router=http://router:8080"])

The router says which workers it has and of which kind each is (`GET /router`), at the moment they are needed: workers
come and go. They are then told directly, as if each had been named. The router's own control verbs are for trainers
that know no sessions: they shut the gate under a hold of their own, so under the hold of an update or a pause of ours
the router would refuse them.

A router that lists workers which this process cannot reach, or whose key it lacks, is a mistake in the setup, and is
said before anything has changed. A worker that has died is none: the router notices it too, and is asked again until
it has or the time is over. A router that does not answer is an engine that does not answer.
"""

import asyncio
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.client.connections import SessionServerAddress
from harness.client.session_server import RoutedWorker, SessionServerClient
from harness.control.engines import EngineServer
from harness.engines.remote.address import ENGINE_KEY, EngineAddress
from harness.errors import EngineError, EngineRejected, EngineUnavailable, ScenarioError, SessionServerError

_E = TypeVar("_E")

_PREFIX = "router="
_LOOKS = 4  # at workers that do not answer, in the time there is
_LOOK_AGAIN_S = 0.5
_NEVER_HEARD = "it has never answered the router, so nobody knows which engine it runs"


@dataclass(frozen=True, slots=True)
class SilentEngine:
    """Stands for an engine that nobody can control now, because nobody knows enough of it."""

    name: str
    error: str

    async def abort_all(self, *, deadline_s: float) -> None:
        """See `EngineWorker`."""
        del deadline_s
        raise EngineUnavailable(self.error)


async def learn_workers(
    engines: Iterable[_E], servers: Sequence[SessionServerAddress | str], seconds: float
) -> list[_E | EngineServer | SilentEngine]:
    """`engines`, with the workers of each `router=URL` in its place.

    A router wants its admin token: that in the variable which its address names (`router=URL#key=VARIABLE`), else that
    of the one among `servers` with the same address. Its workers get the key of `HARNESS_ENGINE_KEY`.

    Raises `ScenarioError` for a server that is no router or refuses the token, and `EngineUnavailable` when no worker
    that a router serves sessions with can be reached from here within `seconds`.
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
            have_answered = all(isinstance(error, EngineRejected) for error in errors)  # so none of them has died
            if have_answered or loop.time() + 2 * _LOOK_AGAIN_S >= until:
                raise EngineUnavailable(
                    f"the router at {address.url} serves sessions with workers that cannot be reached from here:"
                    f" {'; '.join(error.message for error in errors)}. Give it addresses that this process can reach,"
                    f" and this process their key ({ENGINE_KEY})"
                )
            await asyncio.sleep(_LOOK_AGAIN_S)


async def _unreachable(workers: Sequence[RoutedWorker], seconds: float) -> list[EngineError]:
    """Why none of `workers` can be reached; empty when one can, or when there is none."""

    async def ask(worker: RoutedWorker) -> EngineError | None:
        try:
            await EngineServer(worker.url, worker.engine).require_answer(deadline_s=seconds)
        except EngineError as error:
            return error
        return None

    found = await asyncio.gather(*map(ask, workers))
    errors = [error for error in found if error is not None]
    return errors if len(errors) == len(found) else []


def _silent(address: SessionServerAddress, error: SessionServerError) -> SilentEngine:
    """A router that does not answer. Raises `ScenarioError` for one that does, and is none or refuses."""
    name = f"{_PREFIX}{address.url}"
    if error.retryable or error.status >= 500:
        return SilentEngine(name, error.message)
    if error.status in (401, 403):
        raise ScenarioError(
            f"{name}: {error.message}; expected its admin token: that of the session server with the same address, or"
            f" {name}#key=VARIABLE"
        ) from error
    raise ScenarioError(f"{name}: expected a harness router, which lists its workers; {error.message}") from error
