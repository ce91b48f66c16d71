"""The places of a run where faults can be let in: the engine, its network, the session server, and its agents' side.

Open for the time of a block, in front of an engine that is entered and left with it. An engine in this process dies at
its seam; one behind a network dies as a server does, and its own process with it when the run started it.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.engines.base import ProvesScripts, TokenProvider
from harness.server.serving import Around, alone
from harness.server.settings import ServerSettings
from harness.suite.faults.agent_seam import AgentSeam
from harness.suite.faults.engine_seam import FaultyProvider
from harness.suite.faults.killable import KillableLane, KillableServer
from harness.suite.faults.network import FaultyNetwork
from harness.tokens.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class EngineServers:
    """The parts of an engine outside this process.

    Lanes of the run die, and the servers beside them go on; a run without lanes has only the way to its servers, which
    dies instead.
    """

    network: FaultyNetwork
    """In front of the lanes, in their order, and then of every other server."""
    lanes: Sequence[KillableLane] = ()
    """The servers that the run started."""

    async def kill(self) -> None:
        """Let none of those that can die answer any more."""
        await self.network.kill(len(self.lanes) or None)
        for lane in self.lanes:
            await lane.kill()

    async def start(self) -> None:
        """Let them answer again."""
        for lane in self.lanes:
            await lane.start()
        await self.network.revive(len(self.lanes) or None)


@dataclass(slots=True)
class Seams:
    """The places where the faults of a scenario are applied."""

    engine: FaultyProvider
    server: KillableServer
    agents: AgentSeam
    engine_servers: EngineServers | None = None
    """None when the engine is in this process."""
    engine_is_up: bool = True

    async def kill_engine(self) -> None:
        """Let the engine be gone, with everything it was doing."""
        self.engine_is_up = False
        if self.engine_servers is None:
            self.engine.kill()
        else:
            await self.engine_servers.kill()

    async def start_engine(self) -> None:
        """Bring the engine back."""
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
    """A session server on `engine` that faults can reach, its sessions kept in `database`; see `serve` for `around`."""
    agents = AgentSeam()
    if settings.allow_forced_tokens and isinstance(engine, ProvesScripts):
        engine.proves_scripts = True  # as `serve` has an engine do that it enters itself
    async with engine:
        provider = FaultyProvider(engine, None if engine_servers is None else engine_servers.network)
        async with KillableServer(provider, chat_tokenizer, database, settings, agents, around=around) as server:
            yield Seams(provider, server, agents, engine_servers)
