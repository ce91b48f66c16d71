"""An engine server that was started for a run, which can be killed and started again at the same address."""

import os
import signal
from contextlib import suppress
from dataclasses import replace
from urllib.parse import urlsplit

from harness.lanes import LaneSpec, open_lane
from harness.lanes.environment import Say
from harness.lanes.state import Lane
from harness.suite.faults.restartable import Restartable


class KillableLane(Restartable):
    """The server of `spec`. Raises `LaneError` when it cannot be started."""

    def __init__(self, spec: LaneSpec, say: Say) -> None:
        super().__init__()
        self._spec = spec
        self._say = say
        self._lane: Lane | None = None
        self.provider = ""
        """What the engine is called, once it has been started."""

    async def start(self) -> None:
        """A server that generates; see `Restartable.start`."""
        self._lane = await self._holds.enter_async_context(open_lane(self._spec, say=self._say))
        self.provider = self._lane.provider
        self._spec = replace(self._spec, port=urlsplit(self._lane.url).port)

    async def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self._lane is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._lane.group, signal.SIGKILL)
            self._lane = None
        await self._give_back()
