"""Places to inject faults: engine, its network, session server, agents' side.

Session server and engine servers can be killed and restarted at the same address. Killed, the port refuses and
connections reset, without answers. The store is as a killed process leaves it; the engine outlives the session server.
"""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from harness.engines.base import ProvesScripts, TokenProvider
from harness.lab.lanes import LaneSpec, open_lane
from harness.lab.lanes.environment import Say
from harness.lab.lanes.spec import Lane
from harness.rollouts.client.connections import SessionServerAddress
from harness.server.app import SessionServer
from harness.server.serving import Around, RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.sqlite import open_store
from harness.sessions.session import Session
from harness.suite.faults.agent_seam import AgentSeam
from harness.suite.faults.engine_seam import FaultyProvider
from harness.tokens.chat_tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from harness.suite.faults.network import FaultyNetwork

_HANG_UP_S = 0.005  # the loop needs some iterations to drop a connection; until then an answer could reach it


@dataclass(eq=False)
class Restartable(ABC):
    url: str = field(default="", init=False)
    """Valid after the first start, even while killed."""
    _holds: AsyncExitStack = field(default_factory=AsyncExitStack, init=False)
    """Resources of the running server."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._holds.aclose()

    @abstractmethod
    async def start(self) -> None:
        """Start; after `kill`, at the same address."""

    @abstractmethod
    async def kill(self) -> None:
        """End abruptly. Idempotent."""

    async def _release(self) -> None:
        holds, self._holds = self._holds, AsyncExitStack()
        await holds.aclose()


@dataclass(eq=False)
class KillableServer(Restartable):
    """A session server. The caller enters `engine`."""

    engine: TokenProvider
    chat_tokenizer: ChatTokenizer
    database: Path
    settings: ServerSettings
    seam: AgentSeam
    around: Around
    _running: RunningServer | None = field(default=None, init=False)

    @property
    def address(self) -> SessionServerAddress:
        return SessionServerAddress(self.url, self.settings.admin_token)

    @property
    def is_up(self) -> bool:
        return self._running is not None

    @property
    def open_sessions(self) -> dict[str, int]:
        """Sessions and their rollouts' numbers."""
        if self._running is None:
            return {}
        # This server evicts none.
        in_memory = [each for each in self._running.server.sessions if isinstance(each, Session)]
        return {each.session_id: each.config.metadata.get("rollout", -1) for each in in_memory}

    async def start(self) -> None:
        serving = serve(
            self.engine, self.chat_tokenizer, open_store(self.database), self.settings, around=self._behind_seam
        )
        self._running = await self._holds.enter_async_context(serving)
        self.url = self._running.url
        self.settings = replace(self.settings, port=urlsplit(self.url).port or 0)

    async def kill(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.hang_up()
        await asyncio.sleep(_HANG_UP_S)
        self.seam.drop()
        await self._release()

    @asynccontextmanager
    async def _behind_seam(self, server: SessionServer) -> AsyncIterator[ASGIApp]:
        async with self.around(server) as app:
            yield self.seam.around(app)


@dataclass(eq=False)
class KillableLane(Restartable):
    """An engine server. Raises `LaneError` when it cannot start."""

    spec: LaneSpec
    say: Say
    _lane: Lane | None = field(default=None, init=False)

    async def start(self) -> None:
        self._lane = await self._holds.enter_async_context(open_lane(self.spec, say=self.say))
        self.url = self._lane.url
        self.spec = replace(self.spec, port=urlsplit(self.url).port)

    async def kill(self) -> None:
        if self._lane is not None:
            # It may have died by itself.
            with suppress(ProcessLookupError):
                os.killpg(self._lane.group, signal.SIGKILL)
            self._lane = None
        await self._release()


@dataclass(slots=True)
class Seams:
    engine: FaultyProvider
    server: KillableServer
    agents: AgentSeam
    network: "FaultyNetwork | None" = None
    """Proxies of the lanes, in order, then of other servers; None when the engine is in this process."""
    lanes: Sequence[KillableLane] = ()
    engine_is_up: bool = True

    async def kill_engine(self) -> None:
        """Kill the engine: the lanes or, without lanes, the way to all servers."""
        self.engine_is_up = False
        if self.network is None:
            self.engine.kill()
            return
        await self.network.kill(len(self.lanes) or None)
        for lane in self.lanes:
            await lane.kill()

    async def start_engine(self) -> None:
        if self.network is None:
            self.engine.revive()
        else:
            for lane in self.lanes:
                await lane.start()
            await self.network.revive(len(self.lanes) or None)
        self.engine_is_up = True


@asynccontextmanager
async def open_seams(
    engine: TokenProvider,
    chat_tokenizer: ChatTokenizer,
    database: Path,
    settings: ServerSettings,
    network: "FaultyNetwork | None",
    *,
    lanes: Sequence[KillableLane],
    around: Around,
) -> AsyncIterator[Seams]:
    """Serve sessions on `engine`, open to faults. See `serve` for `around`."""
    agents = AgentSeam()
    if settings.allow_forced_tokens and isinstance(engine, ProvesScripts):
        engine.proves_scripts = True  # `serve` does this only for engines that it enters itself
    async with engine:
        provider = FaultyProvider(engine, network)
        async with KillableServer(provider, chat_tokenizer, database, settings, agents, around) as server:
            yield Seams(provider, server, agents, network, lanes)
