"""Which worker serves which request, and who waits: rules, and whatever order things happen in."""

import gc
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from harness.engines.pool.placement import Placement, PrefixMap, WorkerLoad, block_keys
from harness.types import TokenIds, as_ids
from tests.thoroughness import examples

SESSIONS = st.sampled_from([None, "a", "b", "c"])


def placement(count: int = 2, limit: int | None = None) -> tuple[Placement, list[WorkerLoad]]:
    """Workers `0`, `1`, ... that nobody uses yet."""
    under = Placement(limit)
    return under, [under.join(str(index)) for index in range(count)]


def served_by(
    under: Placement,
    session_id: str | None,
    now: float = 0.0,
    tried: tuple[str, ...] = (),
    prompt: TokenIds | None = None,
) -> str | None:
    """The worker that a request of the session gets at once."""
    under.ask(-1, session_id, tried, prompt)
    got = dict(under.grants(now)).get(-1)
    under.withdraw(-1)
    return None if got is None else got.name


def test_a_failed_worker_is_tried_again_after_a_rest():
    """It comes last for a while, then it has its place again."""
    under, (failed, busy) = placement()
    failed.failed_at, busy.in_flight = 100.0, 5

    assert served_by(under, None, now=101.0) == "1"
    assert served_by(under, None, now=106.0) == "0"


def prompt_of(group: int, sample: int = 0, shared: int = 0) -> TokenIds:
    """The words of a template, of a group, and of a sample, 64 ids of each but the first."""
    return as_ids([*range(shared), *[10_000 + group] * 64, *[20_000 + sample] * 64])


def begin(under: Placement, session_id: str, prompt: TokenIds) -> str:
    """The worker of a session that takes its first turn and stays."""
    name = served_by(under, session_id, prompt=prompt)
    assert name is not None
    under.finish(under.workers[name])
    under.place(session_id, under.workers[name], prompt.size)
    return name


def test_samples_of_one_group_are_served_by_one_worker():
    """Eight groups of eight on two workers, which have four of them each."""
    under, _ = placement()

    places = [{begin(under, f"{group} {sample}", prompt_of(group)) for sample in range(8)} for group in range(8)]

    assert [len(each) for each in places] == [1] * 8
    assert [each.sessions for each in under.workers.values()] == [32, 32]


def test_samples_that_come_in_turns_find_their_groups():
    """And those whose prompts differ at their ends, where at least half is of the group."""
    under, _ = placement()
    begun = [(group, begin(under, f"{group} {n}", prompt_of(group, n))) for n in range(8) for group in range(8)]

    assert len(set(begun)) == 8


def test_a_prefix_is_worth_no_more_than_a_few_requests():
    """A group of many is served by all, and a new worker by whoever comes next."""
    under, _ = placement()
    for sample in range(64):
        begin(under, str(sample), prompt_of(0))
    assert sorted(each.sessions for each in under.workers.values()) == [32, 32]

    under.join("2")
    assert begin(under, "new", prompt_of(0)) == "2"


def test_the_words_of_a_template_draw_nobody():
    """What prompts share is less than half of them."""
    under, _ = placement()

    assert [begin(under, str(group), prompt_of(group, shared=64)) for group in range(4)] == ["0", "1", "0", "1"]


def test_a_prefix_draws_to_no_worker_that_cannot_serve():
    """Fenced, full, tried or resting: somebody else serves at once."""
    for spoil in ("fence", "full", "tried", "failed"):
        under, (first, second) = placement(limit=2)
        assert begin(under, "a", prompt_of(0)) == "0"
        second.in_flight = 1  # so that load alone would choose the first
        if spoil == "fence":
            first.fence = "weights"
        elif spoil == "full":
            first.in_flight = 2
        elif spoil == "failed":
            first.failed_at = 0.0
        tried = ("0",) if spoil == "tried" else ()

        assert served_by(under, "b", now=1.0, tried=tried, prompt=prompt_of(0)) == "1", spoil


def test_prefixes_are_forgotten_in_the_order_of_their_last_use():
    keys = [block_keys(as_ids([n] * 64)) for n in range((1 << 16) + 1)]
    known, worker = PrefixMap(), WorkerLoad("0")
    for each in keys[:-1]:
        known.note(each, worker)
    known.note(keys[0], worker)
    known.note(keys[-1], worker)

    assert [known.holders(keys[n]) for n in (0, 1, 2, -1)] == [(worker,), (), (worker,), (worker,)]


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


class Asked(NamedTuple):
    """A request that waits: `drawn` is the worker that was sent the prompt of its group when it asked."""

    session_id: str | None
    tried: set[str]
    group: int | None
    drawn: WorkerLoad | None


class PlacementMachine(RuleBasedStateMachine):
    """Requests, workers that come and go, fences and failures, in any order."""

    LIMIT = 2

    def __init__(self) -> None:
        super().__init__()
        self.under = Placement(self.LIMIT)
        self.now = 0.0
        self.tickets = 0
        self.waiting: dict[int, Asked] = {}
        self.sent: dict[int, list[WorkerLoad]] = {}
        """The workers that were sent the prompt of a group."""
        self.running: list[tuple[int, str | None, WorkerLoad]] = []

    @rule(name=st.sampled_from("xyz"))
    def join_or_leave(self, name: str) -> None:
        if name in self.under.workers:
            self.under.leave(name)
        else:
            self.under.join(name)
        self.grant()

    @rule(session_id=SESSIONS, tried=st.sets(st.sampled_from("xyz"), max_size=1), group=st.sampled_from([None, 0, 1]))
    def ask(self, session_id: str | None, tried: set[str], group: int | None) -> None:
        self.tickets += 1
        is_new = self.under.place_of(session_id) is None and len(self.under.workers) > 1
        group = group if is_new else None
        held = [
            each for each in self.sent.get(group, ()) if each in self.offered(set()) and each.in_flight < self.LIMIT
        ]
        drawn = min(held, key=lambda each: (each.in_flight, each.sessions), default=None)
        self.waiting[self.tickets] = Asked(session_id, tried, group, drawn)
        self.under.ask(self.tickets, session_id, tried, None if group is None else prompt_of(group))
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
        for ticket, asked in self.waiting.items():
            offered = self.offered(asked.tried)
            awake = [worker for worker in offered if not worker.is_resting(self.now)]
            worker = self.usable_home(asked) or min(
                awake or offered, key=lambda each: (busy[each] >= self.LIMIT, busy[each], each.sessions), default=None
            )
            if worker is not None and busy[worker] < self.LIMIT:
                busy[worker] += 1
                grants.append((ticket, worker))
        return grants

    def granted(self) -> Iterator[tuple[int, WorkerLoad]]:
        for ticket, worker in self.under.grants(self.now):
            asked = self.waiting.pop(ticket)
            self.running.append((ticket, asked.session_id, worker))
            if asked.group is not None and worker not in self.sent.setdefault(asked.group, []):
                self.sent[asked.group].append(worker)
            assert worker is self.under.workers[worker.name]
            assert worker.name not in asked.tried
            assert not worker.fence
            assert worker.in_flight <= self.LIMIT
            assert worker is (self.usable_home(asked) or worker)
            yield ticket, worker
        for asked in self.waiting.values():
            home, offered = self.usable_home(asked), self.offered(asked.tried)
            could = [home] if home else [worker for worker in offered if not worker.is_resting(self.now)]
            assert all(worker.in_flight == self.LIMIT for worker in could or offered)

    def offered(self, tried: set[str]) -> list[WorkerLoad]:
        return [worker for worker in self.under.workers.values() if not worker.fence and worker.name not in tried]

    def usable_home(self, asked: "Asked") -> WorkerLoad | None:
        place = self.under.place_of(asked.session_id)
        home = asked.drawn if place is None else place.worker
        return None if home not in self.offered(asked.tried) or home.is_resting(self.now) else home

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
    max_examples=examples(50), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_whatever_happens = PlacementMachine.TestCase
