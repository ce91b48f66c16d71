"""Places of steps: whatever ends in whatever order, a step is complete or says why not; sessions are recorded once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import StepError
from harness.samples.rollout import Outcome, OutcomeKind
from harness.training.collector.groups import GroupIndex, RolloutIndex, ScoredRollout, drop_zero_variance
from harness.training.collector.step_outcome import CarriedGroup, Disposition
from harness.training.collector.step_places import DueRollout, EndedRollout, StepPlaces
from harness.training.collector.step_rules import OnFailure, Order, StepBudget, StepRules
from tests.unit.collector.packed_steps import index_of, scored_rollout

INDEX = index_of(0, 1)


def drop_low(rewards: Sequence[float]) -> str | None:
    """Drop a group without a trained rollout that earned something."""
    return None if any(rewards) else "low"


RULES = st.builds(
    StepRules,
    budget=st.builds(lambda groups, size: StepBudget(groups * size, size), st.integers(1, 5), st.integers(1, 3)),
    world_size=st.integers(1, 2),
    over_sampling=st.integers(0, 3),
    group_filter=st.sampled_from([None, drop_low]),
    attempts=st.integers(1, 3),
    most_dropped=st.integers(0, 4),
    on_failure=st.just(OnFailure.COUNT),
    order=st.sampled_from(Order),
    concurrency=st.integers(1, 12),
)


def ended(index: RolloutIndex, kind: OutcomeKind = OutcomeKind.FINISHED, reward: float = 1.0) -> EndedRollout:
    """A rollout that ended as `kind`."""
    scored = scored_rollout(index)
    rollout = replace(scored.rollout, outcome=Outcome(kind, None, "as planned"))
    return EndedRollout(index, replace(scored, rollout=rollout, reward=reward))


def begin_all(places: StepPlaces) -> list[RolloutIndex]:
    """Begin every rollout that can begin now."""
    begun = []
    while (due := places.begin()) is not None:
        begun.append(due.index)
    return begun


@given(st.data(), RULES)
def test_a_step_is_complete_or_says_why_not(data: st.DataObject, rules: StepRules):
    """Rollouts end in any order and in any way: nothing hangs, nothing is begun twice, and the groups handed over are
    whole, as many as were wanted, each once, in the order that was asked for.
    """
    places = StepPlaces(0, rules)
    wanted = len(rules.budget.slice_of(0, rules.world_size))
    begun: list[RolloutIndex] = []
    running: set[RolloutIndex] = set()
    replaced: Counter[tuple[GroupIndex, int]] = Counter()
    handed_over = []
    kinds = [OutcomeKind.FINISHED, OutcomeKind.FINISHED, OutcomeKind.CRASHED, OutcomeKind.DRAINED]
    try:
        while not places.is_complete:
            while len(running) < rules.concurrency and (due := places.begin()) is not None:
                begun.append(due.index)
                running.add(due.index)
            assert running, "nothing runs, and the step is not complete"
            index = data.draw(st.sampled_from(sorted(running)))
            running.remove(index)
            kind = data.draw(st.sampled_from(kinds))
            replaced[index.group, index.member] += kind is OutcomeKind.DRAINED
            places.settle(ended(index, kind, data.draw(st.sampled_from([0.0, 1.0]))))
            handed_over += places.hand_over()
    except StepError:
        assert max(replaced.values()) == rules.attempts or places.dropped.total() == rules.most_dropped + 1
        return
    assert places.begin() is None
    assert len(set(begun)) == len(begun)
    assert len(handed_over) == wanted
    assert places.delivered == tuple(each.index for each in handed_over)
    if rules.order is Order.INDEX:
        assert list(places.delivered) == sorted(places.delivered)
    assert all(len(each.rollouts) + each.counted == rules.budget.group_size for each in handed_over)
    uses = Counter(each.use for each in places.settled())
    assert uses[Disposition.DELIVERED] == sum(len(each.rollouts) for each in handed_over)
    assert uses[Disposition.FILTERED] == places.dropped.total() * rules.budget.group_size
    left = len({each.group for each in begun}) - wanted
    assert left == len(list(places.over_sampled())) + places.dropped.total()
    for index in sorted(running):
        places.settle(ended(index, OutcomeKind.DRAINED))
    assert places.hand_over() == []
    assert sorted(each.index for each in places.settled()) == sorted(begun)


def test_without_failures_exactly_the_wanted_rollouts_begin():
    """Place by place, group by group, whatever the concurrency is."""
    places = StepPlaces(0, StepRules(StepBudget(4, 2)))
    assert begin_all(places) == [index_of(0, 0, 0), index_of(0, 0, 1), index_of(0, 1, 0), index_of(0, 1, 1)]


def test_a_step_of_a_rank_without_groups_is_complete_at_once():
    """It begins nothing and hands nothing over."""
    places = StepPlaces(0, StepRules(StepBudget(1), rank=0, world_size=2, over_sampling=2))
    assert (places.is_complete, places.begin(), places.hand_over()) == (True, None, [])


def test_by_index_a_group_waits_for_those_before_it():
    """Until they are kept or dropped; by arrival it does not."""
    for order, first in ((Order.INDEX, []), (Order.ARRIVAL, [index_of(0, 1).group])):
        places = StepPlaces(0, StepRules(StepBudget(2), group_filter=drop_low, most_dropped=1, order=order))
        zero, one = begin_all(places)
        places.settle(ended(one))
        assert [group.index for group in places.hand_over()] == first
        places.settle(ended(zero, reward=0.0))
        assert [group.index for group in places.hand_over()] == [one.group for _ in range(1 - len(first))]
        assert begin_all(places) == [index_of(0, 2)]


def test_over_sampled_groups_are_left_when_the_step_is_complete():
    """The first whole ones make it; what still runs is named, and its end changes nothing."""
    places = StepPlaces(0, StepRules(StepBudget(2, 2), over_sampling=1))
    slow, _, *quick = begin_all(places)
    for each in quick:
        assert not places.is_complete
        places.settle(ended(each))
    assert [group.index for group in places.hand_over()] == [quick[0].group]
    assert list(places.over_sampled()) == [slow.group]
    places.settle(ended(slow))
    assert (places.begin(), places.hand_over()) == (None, [])


def test_a_place_that_nobody_fills_fails_the_step_with_the_causes():
    """After as many attempts as it has; the causes of all places are counted."""
    places = StepPlaces(0, StepRules(StepBudget(2), attempts=2))
    zero, one = begin_all(places)
    places.settle(EndedRollout(one, None, "connection refused"))
    places.settle(EndedRollout(zero, None, "it was cancelled"))
    again = begin_all(places)
    assert again == [replace(zero, attempt=1), replace(one, attempt=1)]
    with pytest.raises(StepError, match=r"place 0 of group 1 has used up its 2 .*connection refused x2; it was .* x1"):
        places.settle(EndedRollout(again[1], None, "connection refused"))


def test_more_dropped_groups_than_allowed_fail_the_step_with_the_reasons():
    """A policy whose rewards have no variance left does not generate for ever."""
    places = StepPlaces(0, StepRules(StepBudget(1), group_filter=drop_zero_variance, most_dropped=1))
    [first] = begin_all(places)
    places.settle(ended(first))
    [second] = begin_all(places)
    with pytest.raises(StepError, match="more than 1 groups of a step were dropped: zero_variance x2"):
        places.settle(ended(second))


def end_of(kind: OutcomeKind, session_id: str | None) -> ScoredRollout:
    """A rollout that was to continue from the session "kept", and failed."""
    scored = scored_rollout(INDEX)
    record = scored.rollout.session if session_id else {}
    rollout = replace(scored.rollout, session_id=session_id, outcome=Outcome(kind, None), session=record)
    return replace(scored, rollout=rollout, reward=None)


@pytest.mark.parametrize(
    ("scored", "recorded", "given_back"),
    [
        (end_of(OutcomeKind.CRASHED, "its own"), "its own", []),
        (end_of(OutcomeKind.NOT_STARTED, None), "kept", ["kept"]),
        (end_of(OutcomeKind.DRAINED, None), None, ["kept"]),
        (end_of(OutcomeKind.HARNESS_FAILED, None), None, ["kept"]),
        (None, None, ["kept"]),
    ],
    ids=["own session", "refused", "drained", "no answer", "cancelled"],
)
def test_the_session_that_a_rollout_is_recorded_with(
    scored: ScoredRollout | None, recorded: str | None, given_back: list[str]
):
    """Its own, the kept one where the server has certainly not taken that over, and none where nobody can tell."""
    kept = replace(scored_rollout(INDEX, "kept"), has_kept_session=True)
    places = StepPlaces(1, StepRules(StepBudget(1)), [CarriedGroup(INDEX.group, cut_short={0: kept})])
    assert places.begin() == DueRollout(INDEX, "kept")
    places.settle(EndedRollout(INDEX, scored, "it failed"))
    places.close(keeps=False)
    [settled] = places.settled()
    assert (settled.session_id, places.unclaimed) == (recorded, given_back)
    assert bool(settled.ledger["generated"]) is (recorded is not None)


def test_a_kept_session_that_nobody_has_begun_with_is_recorded_as_it_is():
    """In the step that does not leave it to a next one."""
    kept = replace(scored_rollout(INDEX, "kept"), has_kept_session=True)
    places = StepPlaces(1, StepRules(StepBudget(1)), [CarriedGroup(INDEX.group, cut_short={0: kept})])
    places.close(keeps=False)
    [settled] = places.settled()
    assert (settled.session_id, places.unclaimed) == ("kept", ["kept"])
