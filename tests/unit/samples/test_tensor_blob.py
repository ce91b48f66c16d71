"""Arrays as a safetensors blob, byte for byte as the format has it, and samples in one."""

import json

import numpy as np
import pytest

from harness.errors import RunError
from harness.samples.codec import sample_to_json, samples_from_tensors, samples_to_tensors
from harness.samples.tensor_blob import read_tensors, write_tensors
from tests.unit.samples.test_codec import sample

ARRAYS = {
    "wide": np.arange(3, dtype=np.int64),
    "ids": np.array([[1, -2], [3, 4]], dtype=np.int32),
    "logprobs": np.array([0.5, -np.inf], dtype=np.float32),
    "exact": np.array([], dtype=np.float64),
    "mask": np.array([1, 0, 1], dtype=np.uint8),
}


def test_a_blob_is_what_the_format_says() -> None:
    """A length, a JSON header with offsets into what follows, the bytes."""
    blob = write_tensors({"ids": np.array([1, 2], dtype=np.int32), "mask": np.array([7], dtype=np.uint8)})
    length = int.from_bytes(blob[:8], "little")
    assert json.loads(blob[8 : 8 + length]) == {
        "ids": {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]},
        "mask": {"dtype": "U8", "shape": [1], "data_offsets": [8, 9]},
    }
    assert (length % 8, blob[8 + length :]) == (0, b"\x01\0\0\0\x02\0\0\0\x07")


def test_arrays_come_back() -> None:
    """With their types and shapes, and nobody can write to them."""
    found = read_tensors(write_tensors(ARRAYS))
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
        assert not found[name].flags.writeable


def test_samples_come_back_to_the_bit_and_in_place() -> None:
    """Every column begins where a value of its width may, so nothing has to copy it."""
    blob = samples_to_tensors([sample(), sample()], {"facts": {"phase": "open"}})
    samples, about = samples_from_tensors(blob)
    assert about == {"facts": {"phase": "open"}}
    assert list(map(sample_to_json, samples)) == [sample_to_json(sample())] * 2
    for column in (samples[1].tokens, samples[1].rollout_log_probs, samples[1].proximal_versions):
        assert column.flags.aligned
        assert not column.flags.owndata


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
        write_tensors({"about": np.frombuffer(b'{"samples": 3}', np.uint8)}),
        write_tensors({"about": np.frombuffer(b"[1, 2]", np.uint8)}),
    ],
)
def test_what_is_no_blob_is_refused(blob: bytes) -> None:
    """By an error of ours, whatever it is."""
    with pytest.raises(RunError, match=r"safetensors|not samples|not a sample"):
        samples_from_tensors(blob)
