"""Packs: every segment whole in exactly one of them, unchanged, none of them too long, and few of them."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import SegmentError
from harness.samples.packing import fewest_packs, fill_room, plan_packs
from harness.samples.packs import Pack
from tests.unit.samples.some_segments import lengths_up_to, segment, segments_of

PACKING_LENGTHS = st.sampled_from([1, 7, 60, 511, 512, 513, 1500])
POOLS = PACKING_LENGTHS.flatmap(lambda length: st.tuples(lengths_up_to(length), st.just(length)))


@given(POOLS)
def test_a_plan_holds_every_segment_once_and_no_pack_is_too_long(pool: tuple[list[int], int]):
    """In the order that is promised, and never with fewer packs than the bound: one of them would be wrong."""
    lengths, packing_length = pool
    plan = plan_packs(lengths, packing_length)
    assert sorted(each for pack in plan for each in pack) == list(range(len(lengths)))
    assert all(sum(lengths[each] for each in pack) <= packing_length for pack in plan)
    assert all(pack == sorted(pack) for pack in plan)
    assert [pack[0] for pack in plan] == sorted(pack[0] for pack in plan)
    assert len(plan) >= fewest_packs(lengths, packing_length)
    assert plan == plan_packs(np.asarray(lengths, dtype=np.int32), packing_length)


@given(st.integers(2, 30).flatmap(lambda length: st.tuples(lengths_up_to(length, most=7), st.just(length))))
def test_the_bound_is_one(pool: tuple[list[int], int]):
    """No division of a small pool into packs, all of which are tried, has fewer."""
    lengths, packing_length = pool
    optimum = min(len(packs) for packs in every_plan(lengths, packing_length))
    assert fewest_packs(lengths, packing_length) <= optimum <= len(plan_packs(lengths, packing_length))


def every_plan(lengths: Sequence[int], packing_length: int) -> Iterator[list[int]]:
    """The tokens of each pack, for every division of `lengths`."""
    if not lengths:
        yield []
        return
    for packs in every_plan(lengths[1:], packing_length):
        yield [*packs, lengths[0]]
        for at, tokens in enumerate(packs):
            if tokens + lengths[0] <= packing_length:
                yield [*packs[:at], tokens + lengths[0], *packs[at + 1 :]]


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(0, 60))
def test_a_room_is_filled_as_far_as_any_choice_fills_it(lengths: list[int], room: int):
    """Compared with every choice there is; of the fullest ones it needs the shortest beginning."""
    chosen = fill_room(lengths, room)
    choices = [pick for size in range(len(lengths) + 1) for pick in combinations(range(len(lengths)), size)]
    filled = {pick: total for pick in choices if (total := sum(lengths[each] for each in pick)) <= room}
    fullest = max(filled.values())
    assert filled[tuple(chosen)] == fullest
    needed = min((pick[-1] + 1 if pick else 0) for pick, total in filled.items() if total == fullest)
    assert (chosen[-1] + 1 if chosen else 0) == needed


@pytest.mark.parametrize(("pools", "packing_length"), [(1, 1000), (30, 1000), (30, 4096)])
def test_pools_that_best_fit_packs_badly_are_packed_well(pools: int, packing_length: int):
    """Johnson's pattern, which costs best fit 11 packs where 9 do, comes out with the fewest."""
    half, quarter, more = packing_length // 2, packing_length // 4, packing_length // 100
    a, b, c, d = half + more, quarter + 2 * more, quarter + more, quarter - 2 * more
    lengths = ([a] * 6 + [b] * 6 + [c] * 6 + [d] * 12) * pools
    assert len(plan_packs(lengths, packing_length)) == fewest_packs(lengths, packing_length) == 9 * pools


def test_what_is_no_pool_is_refused():
    """Nothing to pack is no packs; the errors name the segment."""
    assert plan_packs([], 10) == []
    assert fewest_packs([], 10) == 0
    with pytest.raises(SegmentError, match="segment 1 has 11 tokens; packing_length is 10"):
        plan_packs([3, 11], 10)
    with pytest.raises(SegmentError, match="number 2 has 0"):
        plan_packs([3, 4, 0], 10)
    with pytest.raises(SegmentError, match="packing_length: expected at least 1"):
        plan_packs([], 0)


def test_a_pack_has_the_borders_and_positions_that_kernels_take():
    """int32 borders from 0 to the number of tokens, positions from 0 in each segment."""
    pack = Pack.of(segments_of([3, 1, 2]), [4, 5, 9])
    assert (pack.cu_seqlens.dtype, pack.cu_seqlens.tolist()) == (np.int32, [0, 3, 4, 6])
    assert (pack.position_ids.dtype, pack.position_ids.tolist()) == (np.int32, [[0, 1, 2, 0, 0, 1]])
    assert (len(pack), pack.max_seqlen, pack.numbers.tolist()) == (6, 3, [4, 5, 9])


def test_four_rows_of_positions_are_equal_for_text():
    """The first row separates the segments, the other three are the rotary positions of text."""
    pack = Pack.of(segments_of([3, 2]), [0, 1], position_rows=4)
    assert pack.position_ids.tolist() == [[0, 1, 2, 0, 1]] * 4


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_logits_of_a_trained_token_are_in_its_own_segment(lengths: list[int]):
    """One position before it; together they are the tokens with mask 1."""
    pack = Pack.of(segments_of(lengths), range(len(lengths)))
    owner = np.repeat(np.arange(len(lengths)), np.diff(pack.cu_seqlens))
    assert pack.loss_mask[pack.logit_positions + 1].all()
    assert pack.logit_positions.size == pack.loss_mask.sum()
    assert (owner[pack.logit_positions] == owner[pack.logit_positions + 1]).all()


def test_a_digest_tells_packs_apart():
    """By values and by borders; not by the numbers that the segments had."""
    one, other = segment(4, 1), segment(4, 2)
    digest = Pack.of([one, other], [0, 1]).digest()
    assert digest == Pack.of([one, other], [7, 8]).digest()
    assert digest != Pack.of([other, one], [0, 1]).digest()
    assert digest != Pack.of([one, other.with_advantage(9.0)], [0, 1]).digest()
    even, odd = segments_of([2, 2]), segments_of([3, 1])
    assert Pack.of(even, [0, 1]).digest() != Pack.of(odd, [0, 1]).digest()


def test_a_pack_of_nothing_is_refused():
    with pytest.raises(SegmentError, match="at least one segment"):
        Pack.of([], [])
