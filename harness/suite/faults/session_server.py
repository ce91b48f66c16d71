"""A session server that can be killed and started again: the same address, the same store, nothing else kept.

Killed, it is gone with everything in flight: its port refuses, its connections are reset, nobody gets an answer. What
its store had been given is on the disk, as it would be had the process been killed. The engine outlives it.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from harness.client.gate import SessionServerAddress
from harness.engines.base import TokenProvider
from harness.server.serving import RunningServer, serve
from harness.server.settings import ServerSettings
from harness.store.connect import open_store
from harness.suite.faults.agent_seam import AgentSeam
from harness.suite.faults.restartable import Restartable
from harness.tokens.chat_tokenizer import ChatTokenizer

_HANG_UP_S = 0.005  # the loop takes some rounds to lose a connection; until then an answer would find it


class KillableServer(Restartable):
    """`engine` is entered by somebody else; `database` holds the sessions."""

    def __init__(
        self,
        engine: TokenProvider,
        chat_tokenizer: ChatTokenizer,
        database: Path,
        settings: ServerSettings,
        seam: AgentSeam,
    ) -> None:
        super().__init__()
        self._engine = engine
        self._chat_tokenizer = chat_tokenizer
        self._database = database
        self._settings = settings
        self._seam = seam
        self._running: RunningServer | None = None
        self.url = ""
        """Valid once it has been entered, whatever happens to it."""

    @property
    def address(self) -> SessionServerAddress:
        """Where it is, and what opens its admin verbs."""
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
        return {each.session_id: each.config.metadata.get("rollout", -1) for each in self._running.server.sessions}

    async def start(self) -> None:
        """Serve; see `Restartable.start`."""
        serving = serve(
            self._engine, self._chat_tokenizer, open_store(self._database), self._settings, around=self._seam.around
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
        await self._give_back()
