"""The places of a run where faults can be let in: the engine, its network, the session server, and its agents' side.

Open for the time of a block, in front of an engine that is entered and left with it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.engines.base import TokenProvider
from harness.server.settings import ServerSettings
from harness.suite.faults.agent_seam import AgentSeam
from harness.suite.faults.engine_seam import FaultyProvider
from harness.suite.faults.session_server import KillableServer
from harness.tokens.chat_tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True)
class Seams:
    """Where the faults of a scenario strike."""

    engine: FaultyProvider
    server: KillableServer
    agents: AgentSeam

    async def kill_engine(self) -> None:
        """The engine is gone, with everything it was doing."""
        self.engine.kill()

    async def start_engine(self) -> None:
        """The engine is back."""
        self.engine.revive()


@asynccontextmanager
async def open_seams(
    engine: TokenProvider, chat_tokenizer: ChatTokenizer, database: Path, settings: ServerSettings
) -> AsyncIterator[Seams]:
    """A session server on `engine` that faults can reach, its sessions kept in `database`."""
    agents = AgentSeam()
    async with engine:
        provider = FaultyProvider(engine)
        async with KillableServer(provider, chat_tokenizer, database, settings, agents) as server:
            yield Seams(provider, server, agents)
