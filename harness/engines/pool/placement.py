"""Which worker of a pool serves which request, and who waits: pure decisions, no clock and no I/O.

A session keeps its worker, because that one has the cache of its prefix; it waits there while the worker is full. A
session without a place goes where a prompt that begins like its own was sent, as those of one group do, so that the
engines compute a prefix once; but only while that worker has little more to do than the others. Otherwise it goes to
the worker with the least to do. A worker that failed to be reached a moment ago rests: it is used only when nobody else
is left. A fenced worker serves nobody, so its sessions move, at the price of one prefill.

Requests are served in the order in which they asked, worker by worker: one that waits for a full worker never lets a
younger one pass to that worker, and never holds up those that can go elsewhere.

Requests that may go to the same workers wait in one queue, of which only the first is ever looked at: those of sessions
with a place in one queue per worker, the others in one, and requests that have failed somewhere in one for each set of
workers that they have tried. So a decision costs what there are of workers, not of requests.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.engines.pool.prefixes import PrefixMap, block_keys
from harness.types import TokenIds

_REST_S = 5.0
_REMEMBERED_SESSIONS = 100_000
_AHEAD = 8  # requests, and sessions, by which a worker may be ahead of the least busy one for the sake of a prefix


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """The pool's knowledge of one worker, from the moment it joined; a worker that comes back has a new one."""

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


class _Kind(NamedTuple):
    """The facts that decide where a request may go."""

    home: WorkerLoad | None
    """The worker where its session has its place, or the beginning of its prompt."""
    tried: frozenset[str]


class _Waiting(NamedTuple):
    session_id: str | None
    kind: _Kind
    order: int
    """Counts the requests that have asked."""
    prompt_keys: tuple[int, ...]
    """Of a request whose session has no place yet."""


@dataclass(slots=True)
class Placement:
    """The workers of a pool, the places of sessions among them, and the requests that wait for one."""

    limit: int | None = None
    """Requests that one worker has in flight at most; None does not bound them."""
    workers: dict[str, WorkerLoad] = field(default_factory=dict)
    _places: "OrderedDict[str, Place]" = field(default_factory=OrderedDict)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _queues: "dict[_Kind, OrderedDict[int, None]]" = field(default_factory=dict)
    _tickets: dict[str, set[int]] = field(default_factory=dict)
    """The waiting requests of each session."""
    _prefixes: PrefixMap[WorkerLoad] = field(default_factory=PrefixMap)
    _asked: int = 0

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

    def ask(
        self, ticket: int, session_id: str | None, tried: Iterable[str] = (), prompt: TokenIds | None = None
    ) -> None:
        """A request wants to be served, by a worker that is not in `tried`; `prompt` finds one for a new session."""
        self._asked += 1
        home = self._home_of(session_id)
        keys = block_keys(prompt) if home is None and prompt is not None and len(self.workers) > 1 else ()
        kind = _Kind(home or self._holder_of(keys), frozenset(tried))
        self._waiting[ticket] = _Waiting(session_id, kind, self._asked, keys)
        self._queues.setdefault(kind, OrderedDict())[ticket] = None
        if session_id is not None:
            self._tickets.setdefault(session_id, set()).add(ticket)

    def withdraw(self, ticket: int) -> None:
        """A request no longer waits. Idempotent."""
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            return
        self._leave_queue(ticket, waiting.kind)
        if waiting.session_id is not None:
            tickets = self._tickets[waiting.session_id]
            tickets.discard(ticket)
            if not tickets:
                del self._tickets[waiting.session_id]

    def grants(self, now: float) -> Iterator[tuple[int, WorkerLoad]]:
        """The waiting requests that can be served now, each with its worker, which counts it as in flight."""
        while (grant := self._next_grant(now)) is not None:
            ticket, worker = grant
            worker.in_flight += 1
            self._prefixes.note(self._waiting[ticket].prompt_keys, worker)
            self.withdraw(ticket)
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

    def next_for(self, session_id: str | None, now: float) -> WorkerLoad | None:
        """The worker that would serve the session's next request; None while none serves."""
        return self._choose(_Kind(self._home_of(session_id), frozenset()), now, {})

    def place(self, session_id: str | None, worker: WorkerLoad, tokens: int) -> None:
        """The session is served by `worker` from now on; the longest unseen session is forgotten."""
        if session_id is None:
            return
        self._forget(self._places.pop(session_id, None))
        self._places[session_id] = Place(worker, tokens)
        worker.sessions += 1
        self._requeue(session_id)
        if len(self._places) > _REMEMBERED_SESSIONS:
            forgotten, place = self._places.popitem(last=False)
            self._forget(place)
            self._requeue(forgotten)

    def _forget(self, place: Place | None) -> None:
        if place is not None:
            place.worker.sessions -= 1

    def _home_of(self, session_id: str | None) -> WorkerLoad | None:
        place = self.place_of(session_id)
        return None if place is None else place.worker

    def _holder_of(self, keys: Sequence[int]) -> WorkerLoad | None:
        """The least busy worker with the beginning of a prompt, unless it is too far ahead of the others."""
        serving = [each for each in self.workers.values() if not each.fence]
        held = [each for each in self._prefixes.holders(keys) if each in serving and self._has_room(each)]
        found = min(held, key=_busy, default=None)
        if found is None:
            return None
        requests, sessions = (min(counts) for counts in zip(*map(_busy, serving), strict=True))
        is_ahead = found.in_flight >= requests + _AHEAD or found.sessions >= sessions + _AHEAD
        return None if is_ahead else found

    def _requeue(self, session_id: str) -> None:
        """Put what waits for the session where its place is now, each request in the order in which it asked."""
        for ticket in self._tickets.get(session_id, ()):
            waiting = self._waiting[ticket]
            kind = waiting.kind._replace(home=self._home_of(session_id))
            if kind != waiting.kind:
                self._leave_queue(ticket, waiting.kind)
                self._waiting[ticket] = waiting._replace(kind=kind)
                tickets = [*self._queues.get(kind, ()), ticket]
                tickets.sort(key=lambda each: self._waiting[each].order)
                self._queues[kind] = OrderedDict.fromkeys(tickets)

    def _leave_queue(self, ticket: int, kind: _Kind) -> None:
        queue = self._queues[kind]
        del queue[ticket]
        if not queue:
            del self._queues[kind]

    def _next_grant(self, now: float) -> tuple[int, WorkerLoad] | None:
        """The oldest request whose worker has room."""
        least_busy: dict[frozenset[str], WorkerLoad | None] = {}
        found: tuple[int, int, WorkerLoad] | None = None
        for kind, queue in self._queues.items():
            worker = self._choose(kind, now, least_busy)
            ticket = next(iter(queue))
            order = self._waiting[ticket].order
            if worker is not None and self._has_room(worker) and (found is None or order < found[0]):
                found = order, ticket, worker
        return None if found is None else found[1:]

    def _choose(
        self, kind: _Kind, now: float, least_busy: dict[frozenset[str], WorkerLoad | None]
    ) -> WorkerLoad | None:
        """The worker to serve by, or to wait for; None while no worker may serve.

        `least_busy` keeps what was found for requests without a usable place.
        """
        home = kind.home
        if home is not None and not home.fence and home.name not in kind.tried and not home.is_resting(now):
            return home
        if kind.tried not in least_busy:
            offered = [each for each in self.workers.values() if not each.fence and each.name not in kind.tried]
            awake = [each for each in offered if not each.is_resting(now)]
            least_busy[kind.tried] = min(
                awake or offered,
                key=lambda each: (not self._has_room(each), *_busy(each)),
                default=None,
            )
        return least_busy[kind.tried]

    def _has_room(self, worker: WorkerLoad) -> bool:
        return self.limit is None or worker.in_flight < self.limit


def _busy(worker: WorkerLoad) -> tuple[int, int]:
    return worker.in_flight, worker.sessions
