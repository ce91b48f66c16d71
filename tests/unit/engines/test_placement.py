"""Which worker serves which request, and who waits: rules, and whatever order things happen in."""

import gc
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.engines.pool.placement import Placement, WorkerLoad
from tests.thoroughness import examples

SESSIONS = st.sampled_from([None, "a", "b", "c"])


def placement(count: int = 2, limit: int | None = None) -> tuple[Placement, list[WorkerLoad]]:
    """Workers `0`, `1`, ... that nobody uses yet."""
    under = Placement(limit)
    return under, [under.join(str(index)) for index in range(count)]


def served_by(under: Placement, session_id: str | None, now: float = 0.0, tried: tuple[str, ...] = ()) -> str | None:
    """The worker that a request of the session gets at once."""
    under.ask(-1, session_id, tried)
    got = dict(under.grants(now)).get(-1)
    under.withdraw(-1)
    return None if got is None else got.name


def test_a_failed_worker_is_tried_again_after_a_rest():
    """It comes last for a while, then it has its place again."""
    under, (failed, busy) = placement()
    failed.failed_at, busy.in_flight = 100.0, 5

    assert served_by(under, None, now=101.0) == "1"
    assert served_by(under, None, now=106.0) == "0"


def test_a_session_s_place_weighs_more_than_load():
    """A cached prefix is worth a queue."""
    under, (_, home) = placement()
    home.in_flight = 50
    under.place("a", home, tokens=10)

    assert served_by(under, "a") == "1"
    assert served_by(under, "b") == "0"


def test_a_session_waits_for_its_full_worker():
    """Another worker has room and would have to compute the whole prefix."""
    under, (_, home) = placement(limit=1)
    under.place("a", home, tokens=10)
    home.in_flight = 1

    assert served_by(under, "a") is None
    under.finish(home)
    assert served_by(under, "a") == "1"


def test_a_session_of_a_fenced_worker_moves():
    """No session is served by a fenced worker, not even its own."""
    under, (other, home) = placement()
    under.place("a", home, tokens=10)
    home.fence = "weights"

    assert served_by(under, "a") == "0"
    other.fence = "weights"
    assert served_by(under, "a") is None


def test_a_worker_that_came_back_is_another_one():
    """Its cache is empty, so nobody has a place there; what its predecessor works on does not count for it."""
    under, (_, home) = placement()
    under.ask(1, "a")
    under.place("a", home, tokens=10)
    [(_, granted)] = under.grants(0.0)
    under.leave("1")
    back = under.join("1")
    under.finish(granted)

    place = under.place_of("a")
    assert place is not None
    assert (place.worker is back, back.in_flight, back.sessions) == (False, 0, 0)


def test_who_waits_for_one_worker_does_not_hold_up_the_others():
    """An older request for a full worker lets a younger one pass to another worker, and no younger one to its own."""
    under, (free, home) = placement(limit=1)
    under.place("a", home, tokens=10)
    under.place("b", home, tokens=10)
    home.in_flight = 1
    for ticket, session_id in enumerate(["a", "b", None]):
        under.ask(ticket, session_id)

    assert list(under.grants(0.0)) == [(2, free)]
    under.finish(home)
    assert list(under.grants(0.0)) == [(0, home)]
    under.finish(home)
    assert list(under.grants(0.0)) == [(1, home)]


def test_a_request_that_waits_follows_its_session():
    """It asked while the session had no place; once another request has found one, the two wait there in order."""
    under, (free, home) = placement(limit=1)
    under.place("b", home, tokens=10)
    free.in_flight = home.in_flight = 1
    under.ask(0, "a")
    under.ask(1, "b")
    under.place("a", home, tokens=10)

    under.finish(free)
    assert list(under.grants(0.0)) == []
    under.finish(home)
    assert list(under.grants(0.0)) == [(0, home)]
    under.finish(home)
    assert list(under.grants(0.0)) == [(1, home)]


@pytest.mark.parametrize("homeless", [True, False])
def test_a_decision_costs_workers_not_requests(homeless):
    """With twenty times as many that wait, one request that ends costs as many calls as before."""
    costs = []
    for waiting in (100, 2_000):
        under, loads = placement(8, limit=1)
        for load in loads:
            load.in_flight = 1
        for ticket in range(waiting):
            session_id = None if homeless else f"s{ticket}"
            under.place(session_id, loads[ticket % 8], tokens=10)
            under.ask(ticket, session_id)
        under.finish(loads[0])
        costs.append(calls_of(lambda under=under: list(under.grants(0.0))))

    assert costs[0] == costs[1]


def calls_of(work: Callable[[], object]) -> int:
    """How many calls `work` makes, of Python and of C; a garbage collection that falls into it calls others."""
    calls: list[str] = []
    gc.disable()
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event in ("call", "c_call") else None)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(calls)


class PlacementMachine(RuleBasedStateMachine):
    """Requests, workers that come and go, fences and failures, in any order."""

    LIMIT = 2

    def __init__(self) -> None:
        super().__init__()
        self.under = Placement(self.LIMIT)
        self.now = 0.0
        self.tickets = 0
        self.waiting: dict[int, tuple[str | None, set[str]]] = {}
        self.running: list[tuple[int, str | None, WorkerLoad]] = []

    @rule(name=st.sampled_from("xyz"))
    def join_or_leave(self, name: str) -> None:
        if name in self.under.workers:
            self.under.leave(name)
        else:
            self.under.join(name)
        self.grant()

    @rule(session_id=SESSIONS, tried=st.sets(st.sampled_from("xyz"), max_size=1))
    def ask(self, session_id: str | None, tried: set[str]) -> None:
        self.tickets += 1
        self.waiting[self.tickets] = (session_id, tried)
        self.under.ask(self.tickets, session_id, tried)
        self.grant()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        self.under.withdraw(ticket)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), answered=st.booleans())
    def finish(self, data: st.DataObject, answered: bool) -> None:
        _, session_id, worker = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        worker.failed_at = None if answered else self.now
        if answered:
            self.under.place(session_id, worker, tokens=7)
        self.under.finish(worker)
        self.grant()

    @precondition(lambda self: self.under.workers)
    @rule(data=st.data(), reason=st.sampled_from(["", "weights"]))
    def fence(self, data: st.DataObject, reason: str) -> None:
        self.under.workers[data.draw(st.sampled_from(sorted(self.under.workers)))].fence = reason
        self.grant()

    @rule(seconds=st.sampled_from([0.1, 3.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.grant()

    def grant(self) -> None:
        expected = self.grants_by_looking_at_everybody()
        granted = [(ticket, worker) for ticket, worker in self.granted()]
        assert granted == expected

    def grants_by_looking_at_everybody(self) -> list[tuple[int, WorkerLoad]]:
        """What the rules say, request by request in the order in which they asked."""
        busy = {worker: worker.in_flight for worker in self.under.workers.values()}
        grants = []
        for ticket, (session_id, tried) in self.waiting.items():
            awake = [worker for worker in self.offered(tried) if not worker.is_resting(self.now)]
            worker = self.usable_home(session_id, tried) or min(
                awake or self.offered(tried),
                key=lambda each: (busy[each] >= self.LIMIT, busy[each], each.sessions),
                default=None,
            )
            if worker is not None and busy[worker] < self.LIMIT:
                busy[worker] += 1
                grants.append((ticket, worker))
        return grants

    def granted(self) -> Iterator[tuple[int, WorkerLoad]]:
        for ticket, worker in self.under.grants(self.now):
            session_id, tried = self.waiting.pop(ticket)
            self.running.append((ticket, session_id, worker))
            assert worker is self.under.workers[worker.name]
            assert worker.name not in tried
            assert not worker.fence
            assert worker.in_flight <= self.LIMIT
            assert worker is (self.usable_home(session_id, tried) or worker)
            yield ticket, worker
        for session_id, tried in self.waiting.values():
            home = self.usable_home(session_id, tried)
            could = [home] if home else [worker for worker in self.offered(tried) if not worker.is_resting(self.now)]
            assert all(worker.in_flight == self.LIMIT for worker in could or self.offered(tried))

    def offered(self, tried: set[str]) -> list[WorkerLoad]:
        return [worker for worker in self.under.workers.values() if not worker.fence and worker.name not in tried]

    def usable_home(self, session_id: str | None, tried: set[str]) -> WorkerLoad | None:
        place = self.under.place_of(session_id)
        if place is None or place.worker not in self.offered(tried) or place.worker.is_resting(self.now):
            return None
        return place.worker

    @invariant()
    def every_request_is_counted_once(self) -> None:
        running = [worker for _, _, worker in self.running]
        loads = {*running, *self.under.workers.values()}
        assert {load: load.in_flight for load in loads} == {load: running.count(load) for load in loads}
        assert self.under.waiting == len(self.waiting)

    @invariant()
    def sessions_are_counted_where_they_are(self) -> None:
        places = [self.under.place_of(session_id) for session_id in ("a", "b", "c")]
        homes = [place.worker for place in places if place is not None]
        assert {load: load.sessions for load in self.under.workers.values()} == {
            load: homes.count(load) for load in self.under.workers.values()
        }


PlacementMachine.TestCase.settings = settings(
    max_examples=examples(150), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_whatever_happens = PlacementMachine.TestCase
