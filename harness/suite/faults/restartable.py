"""A session server and an engine server that can be killed and restarted at the same address.

Killed, the port refuses and connections reset, without answers. The store is as a killed process leaves it; the engine
outlives the session server.
"""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from harness.engines.base import TokenProvider
from harness.lab.lanes import LaneSpec, open_lane
from harness.lab.lanes.environment import Say
from harness.lab.lanes.state import Lane
from harness.rollouts.client.connections import SessionServerAddress
from harness.server.app import SessionServer
from harness.server.serving import Around, RunningServer, serve
from harness.server.settings import ServerSettings
from harness.server.store.connect import open_store
from harness.sessions.session import Session
from harness.suite.faults.agent_seam import AgentSeam
from harness.tokens.chat_tokenizer import ChatTokenizer

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
    provider: str = field(default="", init=False)
    """Engine name, valid after the start."""
    _lane: Lane | None = field(default=None, init=False)

    async def start(self) -> None:
        self._lane = await self._holds.enter_async_context(open_lane(self.spec, say=self.say))
        self.provider, self.url = self._lane.provider, self._lane.url
        self.spec = replace(self.spec, port=urlsplit(self._lane.url).port)

    async def kill(self) -> None:
        """Kill all processes with SIGKILL."""
        if self._lane is not None:
            # It may have died by itself.
            with suppress(ProcessLookupError):
                os.killpg(self._lane.group, signal.SIGKILL)
            self._lane = None
        await self._release()
