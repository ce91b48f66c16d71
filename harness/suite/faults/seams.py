"""Places to inject faults: engine, its network, session server, agents' side."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.engines.base import ProvesScripts, TokenProvider
from harness.server.serving import Around
from harness.server.settings import ServerSettings
from harness.suite.faults.agent_seam import AgentSeam
from harness.suite.faults.engine_seam import FaultyProvider
from harness.suite.faults.restartable import KillableLane, KillableServer
from harness.tokens.chat_tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from harness.suite.faults.network import FaultyNetwork


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
