"""A trainer gets no sample with masks or teachers that it cannot train on."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.adapters.areal.trajectory import trajectory_columns
from harness.adapters.miles.samples import samples_of
from harness.adapters.verl.output import Room, output_fields
from harness.errors import AdapterError
from harness.samples.miles_codec import encode_for_miles
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.types import Sample
from tests.unit.sessions.test_sampling_masks import one_sample


def rollout_of(sample: Sample, trained: int = 0) -> Rollout:
    session = {"turns": [], "ledger": {"trained": trained, "masked": 0, "dropped": {}}}
    return Rollout("s", Outcome(OutcomeKind.FINISHED, None), (sample,), session, None, 1.0)


class Origin:
    """A miles sample, as far as it is read before the refusal."""


TRAINERS: dict[str, Callable[[Sample], Any]] = {
    "miles": lambda sample: samples_of(Origin(), rollout_of(sample), lambda ids: "", trusts_agent=False),
    "verl": lambda sample: output_fields(rollout_of(sample), sample, Room(99, 99), 0, 1),
    "AReaL": lambda sample: trajectory_columns(sample, 1.0, 0),
    "for miles": lambda sample: encode_for_miles([sample], [], lambda ids: ""),
}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_samples_with_masks_are_refused_by_name(trainer: str) -> None:
    with pytest.raises(Exception, match=f"record: expected no sampling_mask .*{trainer}") as refused:
        TRAINERS[trainer](one_sample())
    assert type(refused.value) is AdapterError or trainer == "for miles"


@pytest.mark.parametrize("trainer", ["verl", "AReaL"])
def test_samples_without_masks_are_taken(trainer: str) -> None:
    assert TRAINERS[trainer](replace(one_sample(), sampling_mask=None))


def taught(**columns: float) -> Sample:
    """A sample with one score by each teacher."""
    bare = replace(one_sample(), sampling_mask=None)
    scores = {name: np.full(bare.response_length, np.nan, np.float32) for name in columns}
    for name, value in columns.items():
        scores[name][0] = value
    return replace(bare, teachers=scores)


@pytest.mark.parametrize("trainer", ["verl", "AReaL"])
def test_teachers_are_refused_where_a_trainer_asks_its_own(trainer: str) -> None:
    with pytest.raises(AdapterError, match=f"teachers: expected none in sessions for {trainer}"):
        TRAINERS[trainer](taught(big=-1.0))


def test_miles_gets_the_scores_of_one_teacher() -> None:
    """A token without one is not trained, because miles takes gaps from its own logprobs; two teachers are refused."""
    sample = taught(big=-1.25)
    sampled = int(sample.loss_mask.sum())

    def miles_sample(ours: Sample) -> Any:
        empty = {"teacher_log_probs": None, "train_metadata": None, "metadata": {}, "status": ""}
        origin = SimpleNamespace(**empty, prefix_cache_info=SimpleNamespace())
        [told] = samples_of(origin, rollout_of(ours, sampled), lambda ids: "", trusts_agent=False)
        return told

    told = miles_sample(sample)
    assert (told.teacher_log_probs[0], told.loss_mask[0]) == (-1.25, sample.loss_mask[0]) == (-1.25, 1)
    assert not any(told.loss_mask[1:])
    assert np.isfinite(told.teacher_log_probs).all()
    assert told.metadata["harness"]["ledger"] == {"trained": 1, "masked": sampled - 1, "dropped": {}}
    assert miles_sample(replace(sample, teachers={})).teacher_log_probs is None
    with pytest.raises(AdapterError, match=r"teachers: expected one, .* got big, small"):
        miles_sample(taught(big=-1.0, small=-2.0))
