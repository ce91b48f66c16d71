"""Samples in a safetensors blob."""

from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy

from harness.errors import RunError
from harness.samples.codec import sample_to_json, samples_from_tensors, samples_to_tensors
from harness.top_logprobs import TopLogprobs
from tests.unit.samples.test_codec import sample


def test_samples_come_back_to_the_bit() -> None:
    top = TopLogprobs(np.array([[5, -1]], np.int32), np.array([[-0.5, np.nan]], np.float32))
    taught = replace(sample(), teachers={"a.b": top.logprobs[0, :1]}, teacher_tops={"a.b": top})
    blob = samples_to_tensors([sample(), taught], {"facts": {"phase": "open"}})
    samples, about = samples_from_tensors(blob)
    assert about == {"facts": {"phase": "open"}}
    assert list(map(sample_to_json, samples)) == [sample_to_json(sample()), sample_to_json(taught)]
    assert not samples[1].tokens.flags.writeable


WHOLE = samples_to_tensors([sample()], {})


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"{}",
        WHOLE[:-1],
        WHOLE[:40],
        b"\xff" * 64,
        (1 << 63).to_bytes(8, "little") + b"{}",
        WHOLE.replace(b"I32", b"I33", 1),
        WHOLE.replace(b"tokens.0", b"tokens.1"),
        WHOLE.replace(b"[0,", b"[9,", 1),
        safetensors.numpy.save({"about": np.frombuffer(b'{"samples": 3}', np.uint8)}),
        safetensors.numpy.save({"about": np.frombuffer(b"[1, 2]", np.uint8)}),
    ],
)
def test_what_is_no_blob_is_refused(blob: bytes) -> None:
    with pytest.raises(RunError, match=r"not samples|not a sample"):
        samples_from_tensors(blob)
