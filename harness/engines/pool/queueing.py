"""Requests that wait, for a bounded time, for a worker that `placement` chooses. They can be aborted."""

import asyncio
import itertools
from collections.abc import Callable

from harness.engines.pool.placement import Placement, WorkerLoad
from harness.errors import EngineUnavailable
from harness.types import TokenIds


class AbortedWaiting(Exception):
    """Raised in a request aborted before it had a worker."""


class Queue:
    """Gives waiting requests the workers that `placement` decides, within `timeout_s`; `standing` is for its error."""

    def __init__(self, placement: Placement, timeout_s: float, standing: Callable[[], str]) -> None:
        self._placement = placement
        self._timeout_s = timeout_s
        self._standing = standing
        self._tickets = itertools.count()
        self._granted: dict[int, asyncio.Future[WorkerLoad]] = {}
        self._names: dict[int, str | None] = {}

    async def worker_for(
        self, session_id: str | None, tried: set[str], request_id: str | None, prompt: TokenIds | None = None
    ) -> WorkerLoad:
        """Wait for a worker, take a place there and add it to `tried`. Raises `EngineUnavailable`, `AbortedWaiting`."""
        ticket = next(self._tickets)
        granted: asyncio.Future[WorkerLoad] = asyncio.get_running_loop().create_future()
        self._granted[ticket], self._names[ticket] = granted, request_id
        self._placement.ask(ticket, session_id, tried, prompt)
        self.grant()
        try:
            async with asyncio.timeout(self._timeout_s):
                worker = await granted
        except BaseException as error:
            # The grant and the timeout or cancellation can fall into one turn of the loop; give the place back.
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.finish(granted.result())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable(
                    f"no worker had room for the request within {self._timeout_s:g} s ({self._standing()})"
                ) from None
            raise
        finally:
            self._placement.withdraw(ticket)
            del self._granted[ticket], self._names[ticket]
        tried.add(worker.name)
        return worker

    def finish(self, worker: WorkerLoad) -> None:
        """Free the place of an ended request and grant it again."""
        self._placement.finish(worker)
        self.grant()

    def grant(self) -> None:
        for ticket, worker in self._placement.grants(asyncio.get_running_loop().time()):
            if self._granted[ticket].done():  # cancelled or aborted a moment ago
                self._placement.finish(worker)
            else:
                self._granted[ticket].set_result(worker)

    def abort(self, request_id: str | None) -> int:
        """Abort one waiting request, or all that have an id (None). Return how many."""
        waiting = [
            self._granted[ticket]
            for ticket, name in self._names.items()
            if name is not None and request_id in (None, name) and not self._granted[ticket].done()
        ]
        for granted in waiting:
            granted.set_exception(AbortedWaiting)
        return len(waiting)
