"""The books of a step: no token is lost or counted twice between a session's ledger and the packs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import LedgerImbalance
from harness.samples.segments import TooLong
from harness.sessions.ledger import Ledger, Unknown
from harness.suite.record.rollout_table import INTERRUPTED
from harness.training.collector.groups import RolloutIndex
from harness.training.collector.record.step_ledger import (
    StepDropReason,
    account_step,
    book_dropped,
    book_rollout,
    book_step,
)
from harness.training.collector.segment_maker import SegmentedSample, SegmentMaker
from harness.training.collector.step_outcome import Disposition
from tests.checkout import ROOT
from tests.unit.collector.packed_steps import index_of, pack_step, usual_uses

MAKER = SegmentMaker(packing_length=20, too_long=TooLong.CUT)


def part(trained: int, masked: int, **dropped: int) -> SegmentedSample:
    """A sample as a step booked it."""
    return SegmentedSample(index_of(0, 0), 0, 0.0, trained + masked, trained, masked, dropped=dropped)


@given(
    st.lists(st.sampled_from(Disposition), max_size=12),
    st.integers(3, 33),
    st.sampled_from([TooLong.CUT, TooLong.DROP]),
)
def test_every_token_of_a_step_is_in_one_column(uses: list[Disposition], packing_length: int, too_long: TooLong):
    """Whatever packs, filters and failures take away: the books balance, and say what the sessions said."""
    step = pack_step(
        3, SegmentMaker(packing_length, too_long=too_long), {index_of(3, at): use for at, use in enumerate(uses)}
    )

    ledger = book_step(step.packed)

    ended = [each for each in step.packed.collected.rollouts if each.use is not Disposition.CARRIED]
    assert ledger.generated == sum(each.ledger["generated"] for each in ended)
    assert ledger.trained == sum(int(pack.loss_mask.sum()) for pack in step.packs)
    assert ledger.difference == 0
    assert ledger.dropped.get("after_incomplete", 0) == 3 * len(ended)
    for use, reason in ((Disposition.FILTERED, "filtered"), (Disposition.OVER_SAMPLED, "over_sampled")):
        delivered = [each.ledger["trained"] + each.ledger["masked"] for each in ended if each.use is use]
        assert ledger.dropped.get(reason, 0) == sum(delivered)


def test_a_rollout_that_counts_and_one_that_was_replaced_have_failed():
    """Neither is trained, and the reason is the same."""
    uses = {index_of(0, 0): Disposition.COUNTED, index_of(0, 1): Disposition.REPLACED}
    step = pack_step(0, MAKER, uses)
    delivered = sum(each.ledger["trained"] + each.ledger["masked"] for each in step.packed.collected.rollouts)

    assert book_step(step.packed).dropped == {"after_incomplete": 6, "failed_rollout": delivered}


def test_reasons_of_the_step_stand_beside_those_of_the_session():
    """A word that both use is one sum."""
    ledger = Ledger(20, 10, 4, {"after_incomplete": 5, "stale": 1}, Unknown(1, 9))

    booked = book_rollout(ledger, [part(6, 1, too_long=3), part(0, 2, stale=2)], "a rollout")

    assert booked == Ledger(20, 6, 3, {"after_incomplete": 5, "stale": 3, "too_long": 3}, Unknown(1, 9))
    assert book_dropped(ledger, "filtered") == Ledger(
        20, 0, 0, {"after_incomplete": 5, "stale": 1, "filtered": 14}, Unknown(1, 9)
    )


def test_a_resumed_rollout_is_balanced_in_its_step():
    """Trained or not, what it inherited stays on the left side."""
    ledger = Ledger(6, 16, 0, {}, inherited=10)
    booked = [book_rollout(ledger, [part(16, 0)], "a rollout"), book_dropped(ledger, "filtered")]

    assert account_step(booked, 16, "a step").inherited == 20


@pytest.mark.parametrize("packed", [5, 7])
def test_a_segment_that_is_lost_or_packed_twice_is_an_imbalance(packed: int):
    """The packs are counted apart from the rollouts."""
    with pytest.raises(LedgerImbalance, match=f"step 3: its packs train {packed} tokens, its rollouts 6"):
        account_step([Ledger(6, 6)], packed, "step 3")


def test_a_pack_that_is_missing_is_an_imbalance():
    """A step that says of itself that it trained more than its packs hold is not believed."""
    packed = pack_step(0, MAKER, usual_uses(0)).packed
    with pytest.raises(LedgerImbalance, match=r"step 0: its packs train \d+ tokens, its rollouts \d+"):
        book_step(replace(packed, packs=packed.packs[1:]))


def test_a_sample_that_is_missing_or_too_many_is_an_imbalance():
    """The samples that a step takes are held against the ledgers of their sessions."""
    packed = pack_step(0, MAKER, usual_uses(0)).packed
    with pytest.raises(LedgerImbalance, match="account for 0 tokens, its session has delivered"):
        book_step(replace(packed, samples=packed.samples[1:]))
    stranger = replace(packed.samples[0], rollout=RolloutIndex(packed.samples[0].rollout.group, 9))
    with pytest.raises(LedgerImbalance, match="samples of rollouts that it does not train"):
        book_step(replace(packed, samples=(*packed.samples, stranger)))


def test_an_interrupted_session_has_the_word_of_runs():
    """The reports of `harness run` and of a training say the same."""
    assert StepDropReason.INTERRUPTED == INTERRUPTED


def test_every_reason_is_documented():
    """The table of docs/training.md is that of the code."""
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = text.split("| dropped as | tokens |\n| --- | --- |\n")[1].split("\n\n")[0]
    assert [line.split("`")[1] for line in table.splitlines()] == list(StepDropReason)
