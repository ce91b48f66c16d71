"""Which worker of a pool serves which request, and who waits: pure decisions, no clock and no I/O.

A session keeps its worker, because that one has the cache of its prefix; it waits there while the worker is full. A
session without a place goes to the worker with the least to do. A worker that failed to be reached a moment ago rests:
it is used only when nobody else is left. A fenced worker serves nobody, so its sessions move, at the price of one
prefill.

Requests are served in the order in which they asked, worker by worker: one that waits for a full worker never lets a
younger one pass to that worker, and never holds up those that can go elsewhere.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_REST_S = 5.0
_REMEMBERED_SESSIONS = 100_000


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """What the pool knows about one worker, from the moment it joined; a worker that comes back has a new one."""

    name: str
    in_flight: int = 0
    sessions: int = 0
    """Sessions that have their place here."""
    failed_at: float | None = None
    """Time of the last failure to reach it; None once it has answered again."""
    fence: str = ""
    """Why it serves nobody; empty while it serves."""

    def is_resting(self, now: float) -> bool:
        """It failed a moment ago."""
        return self.failed_at is not None and now < self.failed_at + _REST_S


class Place(NamedTuple):
    """Where a session was served last."""

    worker: WorkerLoad
    tokens: int
    """Tokens of the session that the worker's cache may hold."""


class _Waiting(NamedTuple):
    session_id: str | None
    tried: Container[str]


@dataclass(slots=True)
class Placement:
    """The workers of a pool, the places of sessions among them, and the requests that wait for one."""

    limit: int | None = None
    """Requests that one worker has in flight at most; None does not bound them."""
    workers: dict[str, WorkerLoad] = field(default_factory=dict)
    _places: "OrderedDict[str, Place]" = field(default_factory=OrderedDict)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self._waiting)

    def join(self, name: str) -> WorkerLoad:
        """A worker that nobody uses yet; its name must not be taken."""
        assert name not in self.workers
        load = self.workers[name] = WorkerLoad(name)
        return load

    def leave(self, name: str) -> None:
        """No further request goes there; sessions that had their place there move with their next one."""
        self.workers.pop(name).fence = "it left the pool"

    def ask(self, ticket: int, session_id: str | None, tried: Container[str] = ()) -> None:
        """A request wants to be served, by a worker that is not in `tried`."""
        self._waiting[ticket] = _Waiting(session_id, tried)

    def withdraw(self, ticket: int) -> None:
        """A request no longer waits. Idempotent."""
        self._waiting.pop(ticket, None)

    def grants(self, now: float) -> Iterator[tuple[int, WorkerLoad]]:
        """The waiting requests that can be served now, each with its worker, which counts it as in flight."""
        for ticket, waiting in list(self._waiting.items()):
            worker = self._choose(waiting, now)
            if worker is not None and self._has_room(worker):
                worker.in_flight += 1
                del self._waiting[ticket]
                yield ticket, worker

    def finish(self, worker: WorkerLoad) -> None:
        """A granted request has come to its end, whatever that was."""
        worker.in_flight -= 1

    def is_exhausted(self, tried: Container[str]) -> bool:
        """Every worker that serves has been tried."""
        return all(worker.name in tried for worker in self.workers.values() if not worker.fence)

    def place_of(self, session_id: str | None) -> Place | None:
        """Where the session was served last, though that worker may have gone."""
        return None if session_id is None else self._places.get(session_id)

    def settle(self, session_id: str | None, worker: WorkerLoad, tokens: int) -> None:
        """The session is served by `worker` from now on; the longest unseen session is forgotten."""
        if session_id is None:
            return
        self._forget(self._places.pop(session_id, None))
        self._places[session_id] = Place(worker, tokens)
        worker.sessions += 1
        if len(self._places) > _REMEMBERED_SESSIONS:
            self._forget(self._places.popitem(last=False)[1])

    def _forget(self, place: Place | None) -> None:
        if place is not None:
            place.worker.sessions -= 1

    def _choose(self, waiting: _Waiting, now: float) -> WorkerLoad | None:
        """The worker to serve by, or to wait for; None while no worker may serve."""
        offered = [each for each in self.workers.values() if not each.fence and each.name not in waiting.tried]
        awake = [each for each in offered if not each.is_resting(now)]
        place = self.place_of(waiting.session_id)
        if place is not None and place.worker in awake:
            return place.worker
        return min(awake or offered, key=self._rank, default=None)

    def _rank(self, worker: WorkerLoad) -> tuple[bool, int, int]:
        return (not self._has_room(worker), worker.in_flight, worker.sessions)

    def _has_room(self, worker: WorkerLoad) -> bool:
        return self.limit is None or worker.in_flight < self.limit
