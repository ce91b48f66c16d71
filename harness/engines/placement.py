"""Which worker of a pool serves the next request: pure decisions, no clock and no I/O.

A session keeps its worker, because that one has the cache of its prefix. A session without one goes to the worker with
the least to do. A worker that failed to be reached comes last until some time has passed, and is tried again then; a
session whose worker fails moves, at the price of one prefill.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_REST_S = 5.0
_REMEMBERED_SESSIONS = 100_000


@dataclass(slots=True)
class WorkerLoad:
    """What the pool knows about one worker."""

    in_flight: int = 0
    sessions: int = 0
    """Sessions that have their place here."""
    failed_at: float | None = None
    """Time of the last failure to reach it; None once it has answered again."""

    def is_resting(self, now: float) -> bool:
        """It failed a moment ago."""
        return self.failed_at is not None and now < self.failed_at + _REST_S


@dataclass(slots=True)
class Placement:
    """The workers of a pool and the places of sessions among them."""

    workers: Sequence[WorkerLoad]
    _places: "OrderedDict[str, int]" = field(default_factory=OrderedDict)

    def order(self, session_id: str | None, now: float) -> list[int]:
        """Indices of all workers, in the order in which a request should be offered to them."""
        home = None if session_id is None else self._places.get(session_id)
        return sorted(range(len(self.workers)), key=lambda index: self._rank(index, home, now))

    def settle(self, session_id: str | None, index: int) -> None:
        """The session is served by the worker `index` from now on; the longest unseen session is forgotten."""
        if session_id is None:
            return
        before = self._places.pop(session_id, None)
        if before is not None:
            self.workers[before].sessions -= 1
        self._places[session_id] = index
        self.workers[index].sessions += 1
        if len(self._places) > _REMEMBERED_SESSIONS:
            _, forgotten = self._places.popitem(last=False)
            self.workers[forgotten].sessions -= 1

    def _rank(self, index: int, home: int | None, now: float) -> tuple[bool, bool, int, int, int]:
        worker = self.workers[index]
        return (worker.is_resting(now), index != home, worker.in_flight, worker.sessions, index)
