"""Places to inject faults: engine, its network, session server, agents' side."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.base import ProvesScripts, TokenProvider
from harness.server.serving import Around, alone
from harness.server.settings import ServerSettings
from harness.suite.faults.agent_seam import AgentSeam
from harness.suite.faults.engine_seam import FaultyProvider
from harness.suite.faults.restartable import KillableLane, KillableServer
from harness.tokens.chat_tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from harness.suite.faults.network import FaultyNetwork


@dataclass(frozen=True, slots=True)
class EngineServers:
    """Engine servers outside this process."""

    network: "FaultyNetwork"
    """Proxies of the lanes, in order, then of other servers."""
    lanes: Sequence[KillableLane] = ()

    async def kill(self) -> None:
        """Kill the lanes or, without lanes, cut off all servers."""
        await self.network.kill(len(self.lanes) or None)
        for lane in self.lanes:
            await lane.kill()

    async def start(self) -> None:
        """Undo `kill`."""
        for lane in self.lanes:
            await lane.start()
        await self.network.revive(len(self.lanes) or None)


@dataclass(slots=True)
class Seams:
    engine: FaultyProvider
    server: KillableServer
    agents: AgentSeam
    engine_servers: EngineServers | None = None
    """None when the engine is in this process."""
    engine_is_up: bool = True

    async def kill_engine(self) -> None:
        self.engine_is_up = False
        if self.engine_servers is None:
            self.engine.kill()
        else:
            await self.engine_servers.kill()

    async def start_engine(self) -> None:
        if self.engine_servers is None:
            self.engine.revive()
        else:
            await self.engine_servers.start()
        self.engine_is_up = True


@asynccontextmanager
async def open_seams(
    engine: TokenProvider,
    chat_tokenizer: ChatTokenizer,
    database: Path,
    settings: ServerSettings,
    engine_servers: EngineServers | None = None,
    *,
    around: Around = alone,
) -> AsyncIterator[Seams]:
    """Serve sessions on `engine`, open to faults. See `serve` for `around`."""
    agents = AgentSeam()
    if settings.allow_forced_tokens and isinstance(engine, ProvesScripts):
        engine.proves_scripts = True  # `serve` does this only for engines that it enters itself
    async with engine:
        provider = FaultyProvider(engine, None if engine_servers is None else engine_servers.network)
        async with KillableServer(provider, chat_tokenizer, database, settings, agents, around=around) as server:
            yield Seams(provider, server, agents, engine_servers)
