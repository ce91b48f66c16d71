"""Decides which worker serves which request, and which requests wait. Pure: no clock, no I/O.

A session stays with its worker, which has its prefix cached, and waits there while it is full. A new session goes to a
worker that was sent the same prefix, as in a group, or to the least busy one if that worker is far busier. A worker
that could not be reached is used only if no other is left. Sessions of a fenced worker move, at the cost of one
prefill.

Each worker serves requests in order of arrival. A request that waits for a full worker never delays those that can go
elsewhere.
"""

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.types import TokenIds

_BLOCK = 64
_REMEMBERED_BLOCKS = 1 << 16
_WORTH = 0.5  # of a prompt; less is what all prompts share, such as the template's text
_REST_S = 5.0
_REMEMBERED_SESSIONS = 100_000
_AHEAD = 8  # requests or sessions by which a worker with the prefix may exceed the least busy one


def block_keys(prompt: TokenIds) -> tuple[int, ...]:
    """Return the keys of the whole blocks of `prompt`, int32 of shape (tokens,). A key covers all before it too."""
    from xxhash import xxh3_64_intdigest

    keys, key = [], 0
    for start in range(0, prompt.size - _BLOCK + 1, _BLOCK):
        key = xxh3_64_intdigest(prompt[start : start + _BLOCK].tobytes(), key)
        keys.append(key)
    return tuple(keys)


class PrefixMap:
    """Workers that were sent each block; evicts the least recently used."""

    def __init__(self) -> None:
        # Evictions in workers are not known; a wrong guess costs one prefill, as with any worker.
        self._holders: OrderedDict[int, tuple[WorkerLoad, ...]] = OrderedDict()

    def note(self, keys: Sequence[int], worker: "WorkerLoad") -> None:
        for key in keys:
            holders = self._holders.pop(key, ())
            self._holders[key] = holders if worker in holders else (*holders, worker)
        while len(self._holders) > _REMEMBERED_BLOCKS:
            self._holders.popitem(last=False)

    def holders(self, keys: Sequence[int]) -> "tuple[WorkerLoad, ...]":
        """Return the workers with the longest known prefix; none if it is under half of the prompt."""
        for index in range(len(keys) - 1, -1, -1):
            if index + 1 < _WORTH * len(keys):
                break
            if holders := self._holders.get(keys[index]):
                return holders
        return ()


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """Load of one worker since it joined."""

    name: str
    in_flight: int = 0
    sessions: int = 0
    failed_at: float | None = None
    """Time of the last connection failure, until the next success."""
    fence: str = ""
    """Reason for not serving, if any."""

    def is_resting(self, now: float) -> bool:
        return self.failed_at is not None and now < self.failed_at + _REST_S


class Place(NamedTuple):
    """Worker that last served a session."""

    worker: WorkerLoad
    tokens: int
    """Tokens of the session that may be cached."""


class _Kind(NamedTuple):
    home: WorkerLoad | None
    """Worker of the session, or of the beginning of its prompt."""
    tried: frozenset[str]


class _Waiting(NamedTuple):
    session_id: str | None
    kind: _Kind
    order: int
    prompt_keys: tuple[int, ...]


@dataclass(slots=True)
class Placement:
    """Workers, places of sessions among them, and waiting requests."""

    limit: int | None = None
    """Maximum requests in flight per worker; None is unbounded."""
    workers: dict[str, WorkerLoad] = field(default_factory=dict)
    _places: "OrderedDict[str, Place]" = field(default_factory=OrderedDict)
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    # Requests that may go to the same workers share a queue, and only its first is examined: one queue per worker for
    # sessions with a place, one for the others, and one per set of tried workers after failures. So a decision costs
    # time in the number of workers, not of requests.
    _queues: "dict[_Kind, OrderedDict[int, None]]" = field(default_factory=dict)
    _tickets: dict[str, set[int]] = field(default_factory=dict)
    _prefixes: PrefixMap = field(default_factory=PrefixMap)
    _asked: int = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def join(self, name: str) -> WorkerLoad:
        assert name not in self.workers
        load = self.workers[name] = WorkerLoad(name)
        return load

    def leave(self, name: str) -> None:
        """Remove the worker; its sessions move with their next request."""
        self.workers.pop(name).fence = "it left the pool"

    def ask(
        self, ticket: int, session_id: str | None, tried: Iterable[str] = (), prompt: TokenIds | None = None
    ) -> None:
        """Queue a request for a worker not in `tried`; `prompt` places a new session."""
        self._asked += 1
        home = self._home_of(session_id)
        keys = block_keys(prompt) if home is None and prompt is not None and len(self.workers) > 1 else ()
        kind = _Kind(home or self._holder_of(keys), frozenset(tried))
        self._waiting[ticket] = _Waiting(session_id, kind, self._asked, keys)
        self._queues.setdefault(kind, OrderedDict())[ticket] = None
        if session_id is not None:
            self._tickets.setdefault(session_id, set()).add(ticket)

    def withdraw(self, ticket: int) -> None:
        """Remove a waiting request. Idempotent."""
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
        """Yield requests that can be served now, counted as in flight there."""
        while (grant := self._next_grant(now)) is not None:
            ticket, worker = grant
            worker.in_flight += 1
            self._prefixes.note(self._waiting[ticket].prompt_keys, worker)
            self.withdraw(ticket)
            yield ticket, worker

    def finish(self, worker: WorkerLoad) -> None:
        worker.in_flight -= 1

    def is_exhausted(self, tried: Container[str]) -> bool:
        """Return True if every serving worker was tried."""
        return all(worker.name in tried for worker in self.workers.values() if not worker.fence)

    def place_of(self, session_id: str | None) -> Place | None:
        return None if session_id is None else self._places.get(session_id)

    def next_for(self, session_id: str | None, now: float) -> WorkerLoad | None:
        return self._choose(_Kind(self._home_of(session_id), frozenset()), now, {})

    def place(self, session_id: str | None, worker: WorkerLoad, tokens: int) -> None:
        if session_id is None:
            return
        self._forget(self._places.pop(session_id, None))
        self._places[session_id] = Place(worker, tokens)
        worker.sessions += 1
        self._requeue(session_id)
        if len(self._places) > _REMEMBERED_SESSIONS:
            # The session unseen for longest.
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
        serving = [each for each in self.workers.values() if not each.fence]
        held = [each for each in self._prefixes.holders(keys) if each in serving and self._has_room(each)]
        found = min(held, key=_busy, default=None)
        if found is None:
            return None
        # A cached prefix is not worth a queue at a worker far ahead of the others.
        requests, sessions = (min(counts) for counts in zip(*map(_busy, serving), strict=True))
        is_ahead = found.in_flight >= requests + _AHEAD or found.sessions >= sessions + _AHEAD
        return None if is_ahead else found

    def _requeue(self, session_id: str) -> None:
        # The session's place has changed; its requests keep their order of arrival in the other queue.
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
        home = kind.home
        if home is not None and not home.fence and home.name not in kind.tried and not home.is_resting(now):
            return home
        # The result is shared by all queues without a usable place in one call of `_next_grant`.
        if kind.tried not in least_busy:
            offered = [each for each in self.workers.values() if not each.fence and each.name not in kind.tried]
            awake = [each for each in offered if not each.is_resting(now)]
            least_busy[kind.tried] = min(
                awake or offered, key=lambda each: (not self._has_room(each), *_busy(each)), default=None
            )
        return least_busy[kind.tried]

    def _has_room(self, worker: WorkerLoad) -> bool:
        return self.limit is None or worker.in_flight < self.limit


def _busy(worker: WorkerLoad) -> tuple[int, int]:
    return worker.in_flight, worker.sessions
