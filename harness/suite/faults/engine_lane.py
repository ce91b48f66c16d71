"""An engine server that was started for a run, which can be killed and started again at the same address."""

import os
import signal
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from harness.lanes import LaneSpec, open_lane
from harness.lanes.environment import Say
from harness.lanes.state import Lane


class KillableLane:
    """The server of `spec`; a context manager. Raises `LaneError` when it cannot be started."""

    def __init__(self, spec: LaneSpec, say: Say) -> None:
        self._spec = spec
        self._say = say
        self._stack = AsyncExitStack()
        self._lane: Lane | None = None
        self.provider = ""
        """What the engine is called, once it has been started."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def start(self) -> None:
        """A server that generates; after `kill`, at the same address."""
        self._lane = await self._stack.enter_async_context(open_lane(self._spec, say=self._say))
        self.provider = self._lane.provider
        self._spec = replace(self._spec, port=urlsplit(self._lane.url).port)

    async def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._lane is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._lane.group, signal.SIGKILL)
            self._lane = None
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()
