"""The record of a step: with its rollouts the step is packed again, digest for digest."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import StepError
from harness.samples.segments import COLUMNS, TooLong
from harness.training.collector.record.step_ledger import book_step
from harness.training.collector.record.step_record import StepRecord, from_bytes, pack_again, to_bytes
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_outcome import Disposition
from tests.thoroughness import examples
from tests.unit.collector.packed_steps import Step, index_of, pack_step, usual_uses

MAKER = SegmentMaker(packing_length=48)


def record_of(step: Step) -> StepRecord:
    """The record of `step`, as it stands in its line."""
    return StepRecord.read(StepRecord.of(step.packed, 17, book_step(step.packed)).to_line())


@settings(max_examples=examples(30))
@given(
    st.permutations([(group, member) for group in range(4) for member in range(3)]),
    st.integers(0, 3),
    st.integers(8, 60),
    st.sampled_from([TooLong.CUT, TooLong.DROP]),
)
def test_a_step_is_packed_again_from_its_line_and_its_rollouts(
    order: list[tuple[int, int]], lookahead: int, packing_length: int, too_long: TooLong
):
    """Whatever ended first, and however its packs were chosen, the same packs come out."""
    maker = SegmentMaker(packing_length, too_long=too_long)
    uses = {index_of(5, group, member): Disposition.DELIVERED for group, member in order}
    step = pack_step(5, maker, {**uses, **usual_uses(6)}, lookahead=lookahead)
    kept = [from_bytes(to_bytes(scored)) for scored in step.rollouts.values()]

    again = pack_again(record_of(step), kept, maker)

    assert [pack.digest() for pack in again] == [pack.digest() for pack in step.packs]
    for mine, trained in zip(again, step.packs, strict=True):
        assert all(np.array_equal(getattr(mine, name), getattr(trained, name)) for name in COLUMNS)


def test_a_record_names_what_became_of_everything():
    """Groups in the order of hand-over, rollouts in that of their ends, and what was ended."""
    record = record_of(pack_step(0, MAKER, usual_uses(0)))

    assert record.groups == ((0, 2), (0, 1), (0, 0))
    assert [(each.group, each.member, each.attempt, each.use) for each in record.rollouts[:2]] == [
        ((0, 2), 0, 0, "replaced"),
        ((0, 2), 0, 1, "delivered"),
    ]
    assert record.ended_groups == ((0, 4),)
    assert record.dropped_groups == {"zero_variance": 1}
    assert record.ledger.difference == 0


def test_other_rollouts_are_not_packed_in_their_place():
    """Neither changed ones, nor segments that are made in another way; what is gone is named."""
    step = pack_step(0, MAKER, usual_uses(0))
    record = record_of(step)
    trained = index_of(0, 1, 1)
    scored = step.rollouts[trained]
    [sample] = scored.rollout.samples
    sample = replace(sample, rollout_log_probs=sample.rollout_log_probs - np.float32(1e-6))
    sample = replace(sample, proximal_logprobs=sample.rollout_log_probs)
    changed = replace(scored, rollout=replace(scored.rollout, samples=(sample,)))

    with pytest.raises(StepError, match=r"comes out with the digest \w{32}, it was \w{32}"):
        pack_again(record, {**step.rollouts, trained: changed}.values(), MAKER)
    with pytest.raises(StepError, match=r"that is not made any more|comes out with the digest"):
        pack_again(record, step.rollouts.values(), SegmentMaker(packing_length=12, too_long=TooLong.CUT))
    with pytest.raises(StepError, match=r"member=1.* is not there; a run keeps the rollouts of its last keep_steps"):
        pack_again(record, [each for each in step.rollouts.values() if each.index != trained], MAKER)


@pytest.mark.parametrize("line", [b"", b"{}", b'{"step": 3', b"\xff", b'{"step": "3"}'])
def test_a_line_that_is_no_record_is_named(line: bytes):
    """A damaged file says so."""
    with pytest.raises(StepError, match="expected the record of a step"):
        StepRecord.read(line)


def test_a_rollout_that_was_kept_comes_back_whole():
    """Equal in every column, and in what its session and its agent said."""
    [scored] = pack_step(0, MAKER, {index_of(0, 0): Disposition.DELIVERED}).rollouts.values()

    back = from_bytes(to_bytes(scored))

    assert replace(back, rollout=replace(back.rollout, samples=())) == replace(
        scored, rollout=replace(scored.rollout, samples=())
    )
    [mine], [theirs] = back.rollout.samples, scored.rollout.samples
    assert (mine.tokens.tolist(), mine.status, mine.metadata) == (
        theirs.tokens.tolist(),
        theirs.status,
        theirs.metadata,
    )
    assert mine.rollout_log_probs.tobytes() == theirs.rollout_log_probs.tobytes()
    with pytest.raises(StepError, match="a rollout that was kept is damaged"):
        from_bytes(to_bytes(scored)[:-9])
