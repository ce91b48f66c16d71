"""Plans of steps: whatever comes to an end in whatever order, the step is complete or says why it cannot be."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import StepError
from harness.training.collector.fates import RolloutFate
from harness.training.collector.step_plan import Order, RolloutAttempt, StepPlan

PLANS = st.builds(
    StepPlan,
    wanted=st.integers(0, 5),
    group_size=st.integers(1, 3),
    over_sampling=st.integers(0, 3),
    attempts=st.integers(1, 3),
    most_dropped=st.integers(0, 4),
    order=st.sampled_from(Order),
)


def begin_all(plan: StepPlan) -> list[RolloutAttempt]:
    """Every rollout that can begin now."""
    begun = []
    while (attempt := plan.begin()) is not None:
        begun.append(attempt)
    return begun


@given(st.data(), PLANS, st.integers(1, 12))
def test_a_step_is_complete_or_says_why_not(data: st.DataObject, plan: StepPlan, concurrency: int):
    """Rollouts end in any order and in any way: nothing hangs, nothing is begun twice, and the groups handed over are
    whole, as many as were wanted, each once, in the order that was asked for.
    """
    settled: dict[RolloutAttempt, RolloutFate] = {}
    begun: list[RolloutAttempt] = []
    kept: list[int] = []
    handed_over: list[int] = []
    try:
        while not plan.is_complete:
            while len(plan.running) < concurrency and (attempt := plan.begin()) is not None:
                begun.append(attempt)
            assert plan.running, "nothing runs, and the step is not complete"
            attempt = data.draw(st.sampled_from(sorted(plan.running)))
            settled[attempt] = data.draw(
                st.sampled_from([RolloutFate.KEPT, RolloutFate.KEPT, RolloutFate.COUNTED, RolloutFate.REPLACED])
            )
            if plan.settle(attempt, settled[attempt], "engine_failed"):
                reason = data.draw(st.sampled_from([None, None, "zero_variance"]))
                plan.judge(attempt.group, reason)
                kept += [] if reason else [attempt.group]
            handed_over += plan.hand_over()
    except StepError:
        tried = max((each.number for each in settled if settled[each] is RolloutFate.REPLACED), default=-1) + 1
        assert tried == plan.attempts or plan.dropped.total() == plan.most_dropped + 1
        return
    assert plan.begin() is None
    assert len(set(begun)) == len(begun)
    assert handed_over == (kept if plan.order is Order.ARRIVAL else sorted(kept))
    assert len(handed_over) == plan.wanted
    filled = Counter(each.group for each, fate in settled.items() if fate is not RolloutFate.REPLACED)
    assert all(filled[group] == plan.group_size for group in handed_over)
    assert plan.fates == Counter(settled.values())
    ended = {each.group for each in begun} - set(kept)
    assert len(ended) == len(plan.over_sampled) + plan.dropped.total()
    for attempt in sorted(plan.running):
        assert not plan.settle(attempt, RolloutFate.REPLACED)
    assert not plan.running
    assert plan.hand_over() == []


def test_without_failures_exactly_the_wanted_rollouts_begin():
    """Place by place, group by group, whatever the concurrency is."""
    plan = StepPlan(wanted=2, group_size=2)
    assert begin_all(plan) == [
        RolloutAttempt(0, 0, 0),
        RolloutAttempt(0, 1, 0),
        RolloutAttempt(1, 0, 0),
        RolloutAttempt(1, 1, 0),
    ]


def test_a_step_of_a_rank_without_groups_is_complete_at_once():
    """It begins nothing and hands nothing over."""
    plan = StepPlan(wanted=0, over_sampling=2)
    assert plan.is_complete
    assert plan.begin() is None
    assert plan.hand_over() == []


def test_by_index_a_group_waits_for_those_before_it():
    """Until they are kept or dropped; by arrival it does not."""
    for order, first in ((Order.INDEX, []), (Order.ARRIVAL, [1])):
        plan = StepPlan(wanted=2, most_dropped=1, order=order)
        zero, one = begin_all(plan)
        assert plan.settle(one, RolloutFate.KEPT)
        plan.judge(1)
        assert plan.hand_over() == first
        assert plan.settle(zero, RolloutFate.KEPT)
        plan.judge(0, "zero_variance")
        assert plan.hand_over() == ([1] if order is Order.INDEX else [])
        assert begin_all(plan) == [RolloutAttempt(2, 0, 0)]


def test_over_sampled_groups_are_left_when_the_step_is_complete():
    """The first whole ones make it; what still runs is named, and its end changes nothing."""
    plan = StepPlan(wanted=1, group_size=2, over_sampling=1)
    slow, _, *quick = begin_all(plan)
    assert [plan.settle(each, RolloutFate.KEPT) for each in quick] == [False, True]
    plan.judge(1)
    assert plan.is_complete
    assert (plan.hand_over(), plan.over_sampled) == ([1], [0])
    assert not plan.settle(slow, RolloutFate.KEPT)
    assert plan.begin() is None


def test_a_place_that_nobody_fills_fails_the_step_with_the_causes():
    """After as many attempts as it has; the causes of all places are counted."""
    plan = StepPlan(wanted=2, attempts=2)
    zero, one = begin_all(plan)
    assert not plan.settle(one, RolloutFate.REPLACED, "engine_failed: connection refused")
    assert not plan.settle(zero, RolloutFate.REPLACED, "no reward")
    again = begin_all(plan)
    assert again == [RolloutAttempt(0, 0, 1), RolloutAttempt(1, 0, 1)]
    with pytest.raises(StepError, match=r"place 0 of group 1 has used up its 2 .*connection refused x2; no reward x1"):
        plan.settle(again[1], RolloutFate.REPLACED, "engine_failed: connection refused")


def test_more_dropped_groups_than_allowed_fail_the_step_with_the_reasons():
    """A policy whose rewards have no variance left does not generate for ever."""
    plan = StepPlan(wanted=1, most_dropped=1)
    for _ in range(2):
        [attempt] = begin_all(plan)
        assert plan.settle(attempt, RolloutFate.KEPT)
        if not plan.dropped:
            plan.judge(attempt.group, "zero_variance")
    with pytest.raises(StepError, match="more than 1 groups of a step were dropped: zero_variance x2"):
        plan.judge(1, "zero_variance")


def test_calls_that_make_no_sense_are_refused():
    """A rollout that does not run, a group that is not whole or was judged, a plan of nothing."""
    plan = StepPlan(wanted=1, group_size=2)
    first, second = begin_all(plan)
    with pytest.raises(StepError, match="does not run"):
        plan.settle(RolloutAttempt(0, 0, 1), RolloutFate.KEPT)
    assert not plan.settle(first, RolloutFate.KEPT)
    with pytest.raises(StepError, match="does not run"):
        plan.settle(first, RolloutFate.KEPT)
    with pytest.raises(StepError, match="group 0 cannot be judged"):
        plan.judge(0)
    assert plan.settle(second, RolloutFate.COUNTED)
    plan.judge(0)
    for group in (0, 1):
        with pytest.raises(StepError, match=f"group {group} cannot be judged"):
            plan.judge(group)
    with pytest.raises(StepError, match="expected wanted, over_sampling and most_dropped"):
        StepPlan(wanted=1, attempts=0)
