"""One update of the weights of one engine server, so that no token ever carries the version of other weights.

    1 announce   a label that is no version, while the server still has its old weights
    2 load       the new ones; a load that breaks off leaves nobody knows what
    3 adopt      no cache of the old ones, and then the label of the new ones

Loading and labeling are several calls, and each of them may fail, take too long, or be cancelled. From the first to the
last the server carries a label that is no version, so whatever it samples in between is refused and never counted as
somebody's. After a call that got no answer the server is asked; if it cannot say, it stays unsettled. Old weights are
never put back: what they were is known to whoever drives the update, or to nobody. An unsettled server stays paused
until an update succeeds; `resume` of its provider refuses.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from harness.engines.base import PauseMode
from harness.engines.remote.served_label import ServedLabel
from harness.errors import EngineError, WeightsUnsettled
from harness.machine.deadlines import to_the_end
from harness.samples.versions import require_settled, unsettled_label


class ChangingServer(Protocol):
    """An engine server whose weights are being changed. Every method raises `EngineError`."""

    async def is_paused(self) -> bool:
        """Nothing is sampled now."""

    async def pause(self, mode: PauseMode) -> None:
        """See `TokenProvider.pause`."""

    async def resume(self) -> None:
        """See `TokenProvider.resume`."""

    async def read_version(self) -> str:
        """See `TokenProvider.read_version`."""

    async def require_fitting(self, path: Path) -> None:
        """Raises `EngineRejected` when the checkpoint in `path` is seen not to fit."""

    async def announce_change(self, label: str) -> None:
        """Carry `label`, which is no version, from now on."""

    async def load(self, path: Path, version: str) -> None:
        """Load the checkpoint in `path`."""

    async def adopt(self, version: str) -> None:
        """Drop what the old weights have computed, and carry `version`."""


class WeightChange:
    """The updates of one server, one at a time.

    Args:
        name: Of the server, for messages.
        server: Takes the steps.
        served: The label of the server.
    """

    def __init__(self, name: str, server: ChangingServer, served: ServedLabel) -> None:
        self._name = name
        self._server = server
        self._served = served
        self._one_at_a_time = asyncio.Lock()  # two updates at once would label the weights of one with the other's
        self._has_paused = False
        """An update paused the server and left it so."""

    async def run(self, path: Path, version: str) -> None:
        """See `TokenProvider.update_weights`; a server that was paused before stays paused."""
        require_settled(version)
        async with self._one_at_a_time:
            await self._server.require_fitting(path)
            if not self._has_paused and await self._server.is_paused():
                await self._change(path, version)
                return
            self._has_paused = True
            try:
                await self._server.pause(PauseMode.KEEP)
                await self._change(path, version)
            finally:
                if not self._served.is_unsettled:
                    self._has_paused = False
                    await to_the_end(self._server.resume())

    async def expect(self, version: str) -> None:
        """See `ExpectsTransfer.expect_transfer`."""
        require_settled(version)
        async with self._one_at_a_time:
            self._served.set(unsettled_label(version))
            await self._server.announce_change(self._served.label)

    async def require_settled(self) -> None:
        """Raises `WeightsUnsettled` unless the server's weights have a version; asks the server first."""
        with suppress(EngineError):
            await self._server.read_version()
        if self._served.is_unsettled:
            raise WeightsUnsettled(
                f"{self._name} stays paused: its label is {self._served.label!r}, so an update of its weights is under"
                " way or broke off; update it again, or restart it"
            )

    async def _change(self, path: Path, version: str) -> None:
        unsettled = unsettled_label(version)
        self._served.set(unsettled)
        try:
            await self._server.announce_change(unsettled)
            await self._server.load(path, version)
            await to_the_end(self._adopt(version))
        except BaseException as error:
            await to_the_end(self._look(unsettled))
            if not isinstance(error, EngineError):
                raise
            if self._served.is_unsettled:
                raise WeightsUnsettled(
                    f"{self._name} did not take the weights in {path}: {error.message}; nobody knows what it has now,"
                    f" so it serves nobody, under the label {self._served.label!r}, until an update succeeds or it is"
                    " restarted"
                ) from error
            if self._served.label != version:  # the call that failed had changed nothing
                raise

    async def _look(self, otherwise: str) -> None:
        """Find out what the server carries now; `otherwise` when it does not say."""
        try:
            await self._server.read_version()
        except EngineError:
            self._served.set(otherwise)

    async def _adopt(self, version: str) -> None:
        await self._server.adopt(version)
        self._served.set(version)
