"""A session server and an engine server that can be killed and started again at the same address.

Killed, they are gone with everything in flight: the port refuses, connections are reset, nobody gets an answer. The
store of a session server is on the disk as a killed process would have left it; the engine outlives the server.
"""

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from starlette.types import ASGIApp

from harness.client.connections import SessionServerAddress
from harness.engines.base import TokenProvider
from harness.lanes import LaneSpec, open_lane
from harness.lanes.environment import Say
from harness.lanes.state import Lane
from harness.server.app import SessionServer
from harness.server.serving import Around, RunningServer, alone, serve
from harness.server.settings import ServerSettings
from harness.sessions.session import Session
from harness.store.connect import open_store
from harness.suite.faults.agent_seam import AgentSeam
from harness.tokens.chat_tokenizer import ChatTokenizer

_HANG_UP_S = 0.005  # the loop takes some rounds to lose a connection; until then an answer would find it


class Restartable(ABC):
    """A context manager: entering starts it, leaving ends it, and its resources are released however it ended."""

    def __init__(self) -> None:
        self._holds = AsyncExitStack()
        """Its resources while it runs."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._holds.aclose()

    @abstractmethod
    async def start(self) -> None:
        """Run, after `kill` at the same address."""

    @abstractmethod
    async def kill(self) -> None:
        """Be gone, without a word to anybody. Idempotent."""

    async def _release(self) -> None:
        """Release the resources that the operating system would take back from a dead process."""
        holds, self._holds = self._holds, AsyncExitStack()
        await holds.aclose()


class KillableServer(Restartable):
    """A session server. The caller enters `engine`; `database` holds the sessions."""

    def __init__(
        self,
        engine: TokenProvider,
        chat_tokenizer: ChatTokenizer,
        database: Path,
        settings: ServerSettings,
        seam: AgentSeam,
        *,
        around: Around = alone,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._chat_tokenizer = chat_tokenizer
        self._database = database
        self._settings = settings
        self._seam = seam
        self._around = around
        self._running: RunningServer | None = None
        self.url = ""
        """Valid once it has been entered, whatever happens to it."""

    @property
    def address(self) -> SessionServerAddress:
        """Its URL, and the token that opens its admin verbs."""
        return SessionServerAddress(self.url, self._settings.admin_token)

    @property
    def is_up(self) -> bool:
        """Whether it serves now."""
        return self._running is not None

    @property
    def open_sessions(self) -> dict[str, int]:
        """The sessions that it holds, and the number of the rollout that each belongs to."""
        if self._running is None:
            return {}
        in_memory = [each for each in self._running.server.sessions if isinstance(each, Session)]  # it pages none out
        return {each.session_id: each.config.metadata.get("rollout", -1) for each in in_memory}

    async def start(self) -> None:
        """Serve; see `Restartable.start`."""
        serving = serve(
            self._engine,
            self._chat_tokenizer,
            open_store(self._database),
            self._settings,
            around=self._behind_seam,
        )
        self._running = await self._holds.enter_async_context(serving)
        self.url = self._running.url
        self._settings = replace(self._settings, port=urlsplit(self.url).port or 0)

    async def kill(self) -> None:
        """Serve nobody any more, at once."""
        running, self._running = self._running, None
        if running is None:
            return
        running.hang_up()
        await asyncio.sleep(_HANG_UP_S)
        self._seam.drop()
        await self._release()

    @asynccontextmanager
    async def _behind_seam(self, server: SessionServer) -> AsyncIterator[ASGIApp]:
        async with self._around(server) as app:
            yield self._seam.around(app)


class KillableLane(Restartable):
    """The engine server of `spec`, started for a run. Raises `LaneError` when it cannot be started."""

    def __init__(self, spec: LaneSpec, say: Say) -> None:
        super().__init__()
        self._spec = spec
        self._say = say
        self._lane: Lane | None = None
        self.provider = ""
        """The engine's name, once it has been started."""
        self.url = ""
        """Where it is, likewise."""

    async def start(self) -> None:
        """Start a server that generates; see `Restartable.start`."""
        self._lane = await self._holds.enter_async_context(open_lane(self._spec, say=self._say))
        self.provider, self.url = self._lane.provider, self._lane.url
        self._spec = replace(self._spec, port=urlsplit(self._lane.url).port)

    async def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._lane is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._lane.group, signal.SIGKILL)
            self._lane = None
        await self._release()
