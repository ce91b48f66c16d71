"""Named arrays as one safetensors blob in memory, and back; with numpy alone.

The length of the header (8 bytes, little-endian), the header (JSON), the arrays. A blob that is read is not copied: its
arrays look into it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from harness.errors import RunError

_DTYPES = {"I64": "<i8", "I32": "<i4", "U8": "|u1", "F64": "<f8", "F32": "<f4"}
_NAMES = {np.dtype(dtype): name for name, dtype in _DTYPES.items()}
_ALIGNMENT = 8
_LENGTH_BYTES = 8


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def write_tensors(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The blob of `tensors`: int64, int32, uint8, float64 or float32."""
    header: dict[str, _Entry] = {}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = _Entry(_NAMES[tensor.dtype], list(tensor.shape), (offset, end))
        offset = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    data = (np.ascontiguousarray(tensor).data for tensor in tensors.values())
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *data])


def read_tensors(blob: bytes) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a blob, read-only. Raises `RunError` when it is none."""
    try:
        return dict(_read(blob))
    except (msgspec.MsgspecError, ValueError, KeyError, OverflowError) as error:
        raise RunError(f"expected a safetensors blob: {type(error).__name__} {error}") from error


def _read(blob: bytes) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    start = _LENGTH_BYTES + int.from_bytes(blob[:_LENGTH_BYTES], "little")
    for name, entry in msgspec.json.decode(blob[_LENGTH_BYTES:start], type=dict[str, _Entry]).items():
        begin, end = entry.data_offsets
        if not 0 <= begin <= end <= len(blob) - start:
            raise ValueError(f"{name}: offsets {begin}..{end} lie outside of the blob")
        with memoryview(blob) as view:
            yield name, np.frombuffer(view[start + begin : start + end], _DTYPES[entry.dtype]).reshape(entry.shape)
