"""The figures of a step: the same keys in the same order, and what they are."""

from dataclasses import replace

import msgspec
import pytest

from harness.samples.segments import TooLong
from harness.sessions.ledger import Ledger
from harness.training.collector.record.step_ledger import book_step, step_telemetry
from harness.training.collector.record.step_record import StepRecord
from harness.training.collector.segment_maker import SegmentMaker
from harness.training.collector.step_outcome import Disposition, StepTimes, TrainedStep
from harness.training.learner.learner import LossSums, StepReport
from tests.unit.collector.packed_steps import Step, index_of, pack_step, usual_uses

MAKER = SegmentMaker(packing_length=24, too_long=TooLong.CUT)
TIMES = StepTimes(total_s=5.0, forward_s=2.0, finish_s=0.5, pack_waits_s=1.5, overlap_s=0.5)

KEYS = """
global_step policy_version rollout_seed_base stage2/raw_rollouts rollout/reward_mean rollout/groups_dropped
rollout/groups_ended rollout/delivered rollout/counted rollout/replaced rollout/filtered rollout/over_sampled
rollout/carried rollout/dropped_trailing_turns rollout/repeat_terminate_active
rollout/repeat_terminate_triggered_sequences rollout/version_lag_min rollout/version_lag_mean
rollout/version_lag_max rollout/proximal_share train/samples_total train/micro_steps train/packing_efficiency
train/loss train/gradient_norm train/learning_rate train/trained_tokens train/ratio_mean train/kl
train/clipped_share train/weight_mean train/capped_share train/pack_waits_s time/step_s time/rollout_generate_s
time/forward_s time/finish_s time/overlap_share ledger/generated ledger/trained ledger/masked
ledger/unknown_requests ledger/unknown_tokens ledger/difference dropped/after_incomplete dropped/other_sample
dropped/main dropped/resample dropped/compaction dropped/rejected dropped/subagent dropped/side dropped/stray
dropped/superseded dropped/failed_turn dropped/undelivered dropped/after_stop dropped/restarted dropped/unversioned
dropped/invalid_reply dropped/missing_rows dropped/left_behind dropped/filtered dropped/over_sampled dropped/stale
dropped/too_long
dropped/failed_rollout dropped/cut_by_encoder dropped/interrupted parse_truncated parse_dropped_invalid
drop_poly fn_count
""".split()  # noqa: SIM905  # one word a line would be three pages


def figures_of(step: Step, ledger: Ledger | None = None) -> dict[str, float]:
    """The figures of `step`."""
    report = StepReport(step.packed.collected.step + 1, len(step.packs), LossSums(), 1.0, 0.1, 2e-4)
    record = StepRecord.of(step.packed, 2**62 + 1, ledger or book_step(step.packed))
    trained = TrainedStep(step.packed, report, TIMES)
    return step_telemetry(trained, record, packing_length=MAKER.packing_length)


def test_every_step_has_the_same_keys_in_the_same_order():
    """One without a rollout, too."""
    assert list(figures_of(pack_step(0, MAKER, usual_uses(0)))) == KEYS
    assert list(figures_of(pack_step(1, MAKER, {}))) == KEYS


def test_words_of_an_encoder_come_last():
    """Counts of its own, and reasons for which it drops."""
    step = pack_step(0, MAKER, usual_uses(0))
    step.packed = replace(step.packed, encoder_counts={"fn_count": 3, "boxes": 4})
    ledger = Ledger(9, 2, 0, {"no_list": 4, "stale": 3})

    figures = figures_of(step, ledger)

    assert list(figures) == [*KEYS, "dropped/no_list", "boxes"]
    assert (figures["fn_count"], figures["boxes"], figures["dropped/no_list"], figures["dropped/stale"]) == (3, 4, 4, 3)


def test_the_figures_are_those_of_the_step():
    """Rollouts by what became of them, packs, times and the ledger."""
    step = pack_step(4, MAKER, usual_uses(4))
    figures = figures_of(step)
    uses = [each.use for each in step.packed.collected.rollouts]

    assert figures["stage2/raw_rollouts"] == figures["rollout/delivered"] == uses.count(Disposition.DELIVERED) == 6
    assert (figures["rollout/replaced"], figures["rollout/filtered"], figures["rollout/over_sampled"]) == (1, 2, 2)
    assert (figures["rollout/groups_dropped"], figures["rollout/groups_ended"]) == (1, 1)
    assert (figures["train/micro_steps"], figures["train/samples_total"]) == (len(step.packs), 6)
    assert 0 < figures["train/packing_efficiency"] <= 1
    assert (figures["time/overlap_share"], figures["train/pack_waits_s"]) == (0.25, 1.5)
    assert figures["ledger/generated"] == book_step(step.packed).generated
    assert figures["ledger/difference"] == 0
    assert figures["rollout/version_lag_max"] == 0
    assert figures["rollout_seed_base"] == 2**62 + 1
    assert msgspec.json.decode(msgspec.json.encode(figures)) == figures


def test_a_carried_rollout_is_in_the_reward_of_the_step_that_it_ends_in():
    """Its reward is 1 here, that of the other one 0."""
    step = pack_step(3, MAKER, {index_of(3, 0): Disposition.DELIVERED, index_of(3, 1, 1): Disposition.CARRIED})

    assert figures_of(step)["rollout/reward_mean"] == 0.0


@pytest.mark.parametrize("lag", [0, 2])
def test_lags_are_counted_from_the_version_at_the_hand_over(lag: int):
    """A rollout that a step trains after it was begun by an earlier one."""
    maker = replace(MAKER, max_staleness=2)
    step = pack_step(5, maker, {index_of(5 - lag, 0): Disposition.DELIVERED, index_of(5, 1): Disposition.DELIVERED})

    figures = figures_of(step)

    assert figures["rollout/version_lag_max"] == lag
    assert (figures["rollout/version_lag_mean"] > 0) is bool(lag)
