"""Two controllers as processes, one of them killed with SIGKILL at a step it takes: nothing stays shut for longer.

The step is that of a request which a session server or an engine gets; the process is gone before it is answered.
`HARNESS_SOAK_KILLS` says how many deaths; `make soak` asks for more than `make test`.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from harness.engines.scripted import ScriptStep
from harness.rollouts.control.weights import WeightUpdater
from harness.samples.versions import known_version
from harness.server.serving import RunningServer, serve
from harness.server.store.memory import MemoryStore
from tests.builders import toy_template, user
from tests.checkout import ROOT
from tests.controllers.mortals import Death, Life, Mortality
from tests.fake_engines.fake_server import serving
from tests.fake_engines.fake_sglang import FakeSGLang
from tests.fake_engines.providers import fake_provider, scripted_engine
from tests.session_servers.served import Client, eventually

KILLS = int(os.environ.get("HARNESS_SOAK_KILLS", "3"))
PROGRAM = Path(__file__).with_name("control.py")
TTL_S = 1.5
PAIRS = [("update", "abort"), ("update", "pause"), ("update", "update"), ("abort", "update"), ("pause", "update")]
"""The first of each pair dies."""
MOST_STEPS = {"update": 11, "abort": 4, "pause": 4}


class WatchedEngine(FakeSGLang):
    """Its requests are steps of the controller that dies."""

    life = Life(None)

    def app(self) -> web.Application:
        app = super().app()
        app.middlewares.insert(0, self._step)
        return app

    @web.middleware
    async def _step(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in ("/pause_generation", "/update_weights_from_disk", "/update_weight_version"):
            return await handler(request)
        answers: list[web.StreamResponse] = []

        async def take() -> None:
            answers.append(await handler(request))

        with suppress(Exception):
            await self.life.step(request.path, take)
        return answers[0] if answers else web.Response(status=500)


@asynccontextmanager
async def running(lives: list[Life]) -> AsyncIterator[tuple[WatchedEngine, RunningServer, Client]]:
    """An engine, a session server in front of it, and whoever looks at both."""
    engine = WatchedEngine(scripted_engine(ScriptStep(text="Understood.")))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(serving(engine, notices_disconnects=False))
        session_server = serve(
            fake_provider(engine),
            toy_template(),
            MemoryStore(),
            around=lambda server: nullcontext(Mortality(server.app(), lives, lambda: 0.0)),
        )
        server = await stack.enter_async_context(session_server)
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=30))
        yield engine, server, Client(http, engine.engine, server.server, server.url, server.restored)


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quiet_logs")
async def test_a_controller_that_is_killed_keeps_nothing_shut_and_spoils_nothing():
    """One death after another, at the same server and engine."""
    dice = random.Random(7)
    lives = [Life(None), Life(None)]
    async with running(lives) as (engine, server, client):
        for number in range(KILLS):
            kinds = PAIRS[number % len(PAIRS)]
            death = dice.choice([Death.BEFORE, Death.AFTER])
            lives[:] = [Life(dice.randrange(MOST_STEPS[kinds[0]]), death), Life(None)]
            # The engine cannot tell one update from another, so of two only the session server's steps are counted.
            engine.life = lives[0] if kinds[0] == "update" != kinds[1] else Life(None)
            await fight(kinds, lives, engine, server, 2 * number + 1)
            await eventually(lambda: not server.server.gatekeeper.gate.holds)
            await goes_on(engine, server, client, 2 * number + 2)


async def fight(
    kinds: tuple[str, str], lives: list[Life], engine: WatchedEngine, server: RunningServer, version: int
) -> None:
    """Both at once, until the one is dead and the other done."""
    processes = []
    for number, (kind, life) in enumerate(zip(kinds, lives, strict=True)):
        arguments = [kind, f"{server.url}/c{number}", f"sglang={engine.url}", str(version), str(TTL_S)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), *arguments, cwd=ROOT, stderr=asyncio.subprocess.PIPE
        )
        life.end = lambda pid=process.pid: os.kill(pid, signal.SIGKILL)
        processes.append(process)
    ends = [process.communicate() for process in processes]
    async with asyncio.timeout(120):
        (_, _), (_, said) = await asyncio.gather(*ends)

    assert processes[0].returncode in (0, 1, -signal.SIGKILL)
    assert processes[1].returncode == 0, (kinds, lives, said.decode()[-3000:])


async def goes_on(engine: WatchedEngine, server: RunningServer, client: Client, version: int) -> None:
    """Sessions are served; an engine whose weights nobody knows says so until it has been updated."""
    engine.life = Life(None)
    if known_version(engine.engine.weight_version) is None:
        await eventually(lambda: bool(server.server.left_engines.problem))
        assert (await client.http.get("/health")).json()["status"] in ("engine_paused", "weights_unsettled")
        async with WeightUpdater([f"sglang={engine.url}"], [server.url]).update(version) as update:
            await update.apply(Path("/weights/b"))
    await eventually(lambda: server.server.left_engines.problem is None)
    await eventually(engine._gate.is_set)
    assert await client.say(await client.create(), [user("a")])
