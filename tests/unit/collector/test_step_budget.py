"""Budgets: counts add up over ranks, and groups stay whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import StepError
from harness.training.collector.step_budget import StepBudget


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 12))
def test_every_group_is_one_ranks(groups: int, group_size: int, world_size: int):
    """In order, without gap or overlap; the shares differ by one at most, and some may be empty."""
    budget = StepBudget(groups * group_size, group_size)
    slices = [budget.slice_of(rank, world_size) for rank in range(world_size)]
    assert [group for each in slices for group in each] == list(range(budget.groups))
    assert max(map(len, slices)) - min(map(len, slices)) <= 1


@given(st.integers(1, 500), st.integers(1, 16), st.integers(1, 16))
def test_a_covering_budget_is_the_least_whole_number_of_batches(rollouts: int, per_device_batch: int, world_size: int):
    """At least what was asked for, and less than one global batch more."""
    covered = StepBudget.cover(rollouts, per_device_batch, world_size).rollouts_per_step
    assert covered % (per_device_batch * world_size) == 0
    assert rollouts <= covered < rollouts + per_device_batch * world_size


def test_a_budget_is_derived_from_what_a_trainer_counts_in():
    """Per-device batch, ranks, and packs between two updates."""
    assert StepBudget.derive(2, 4, 8, group_size=16) == StepBudget(64, 16)


def test_what_is_no_budget_is_refused():
    """Field and value are in the message."""
    with pytest.raises(StepError, match="rollouts_per_step is 30, which is no multiple of group_size, 8"):
        StepBudget(30, 8)
    for rollouts, group_size in ((0, 1), (8, 0), (-8, 8)):
        with pytest.raises(StepError, match="at least 1"):
            StepBudget(rollouts, group_size)
    with pytest.raises(StepError, match="at least 1"):
        StepBudget.cover(8, 0, 4)
    for rank in (-1, 2):
        with pytest.raises(StepError, match="rank from 0 to 1"):
            StepBudget(8).slice_of(rank, 2)
