"""The table of sample columns, and that each of its readers has them all."""

from dataclasses import fields

import numpy as np

from harness.adapters.areal.trajectory import trajectory_columns
from harness.adapters.miles.convert import COLUMNS as MILES_COLUMNS
from harness.samples.codec import sample_from_json, sample_to_json, samples_from_tensors, samples_to_tensors
from harness.samples.columns import COLUMNS, TRAINER_COLUMNS
from harness.samples.delivery import cut_response
from harness.types import Sample
from tests.builders import sample


def full() -> Sample:
    """A sample of four response tokens whose columns all differ from their fill."""
    columns = {each.name: np.arange(1, 5).astype(each.dtype) for each in COLUMNS}
    return sample(
        tokens=np.arange(6, dtype=np.int32), response_length=4, **columns, metadata={"turns": [], "spans": []}
    )


def test_every_array_of_a_sample_but_its_tokens_is_in_the_table():
    arrays = {each.name for each in fields(Sample) if isinstance(getattr(full(), each.name), np.ndarray)}

    assert arrays - {"tokens"} == {each.name for each in COLUMNS}


def test_every_reader_of_the_table_has_every_column():
    """JSON, tensors, cuts, and the trainers, by the names that the table has."""
    whole = full()
    [back], _ = samples_from_tensors(samples_to_tensors([whole], {}))
    areal = trajectory_columns(whole, 0.0, 0)
    for each in COLUMNS:
        values = getattr(whole, each.name)
        assert getattr(back, each.name).tolist() == values.tolist()
        assert getattr(sample_from_json(sample_to_json(whole)), each.name).tolist() == values.tolist()
        assert getattr(cut_response(whole, 3), each.name).tolist() == values[:3].tolist()
    assert tuple(each.trainer_name for each in TRAINER_COLUMNS) == MILES_COLUMNS
    for each in TRAINER_COLUMNS:
        column = areal["versions" if each.name == "behavior_versions" else each.name]
        assert column.tolist() == [each.fill] * 2 + getattr(whole, each.name).tolist()
