"""A trainer that normalizes over the whole vocabulary gets no sample whose logprobs are over masks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from harness.adapters.areal.trajectory import trajectory_columns
from harness.adapters.miles.samples import samples_of
from harness.adapters.verl.output import Room, output_fields
from harness.errors import AdapterError
from harness.samples.miles_codec import encode_for_miles
from harness.samples.rollout import Outcome, OutcomeKind, Rollout
from harness.types import Sample
from tests.unit.sessions.test_sampling_masks import one_sample


def rollout_of(sample: Sample) -> Rollout:
    session = {"turns": [], "ledger": {"trained": 0, "masked": 0, "dropped": {}}}
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
