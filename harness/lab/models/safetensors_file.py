"""Writer of bfloat16 safetensors, with numpy alone. The library wants all tensors at once, and torch starts slowly."""

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.machine.cache import FetchPhase, FetchProgress

_ALIGNMENT = 8
_BFLOAT16_BYTES = 2


class TensorShape(NamedTuple):
    name: str
    shape: tuple[int, ...]


def write_bfloat16(
    path: Path, shapes: Sequence[TensorShape], tensors: Iterable[npt.NDArray[np.float32]], progress: FetchProgress
) -> None:
    """Write `tensors`, rounded to bfloat16, in the order of `shapes`, whole or row after row."""
    layout: dict[str, Any] = {}
    total = done = 0
    for name, shape in shapes:
        end = total + _BFLOAT16_BYTES * prod(shape)
        layout[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total, end]}
        total = end
    # The format: the size of the header, the header as JSON, and the bytes.
    header = json.dumps({"__metadata__": {"format": "pt"}, **layout}).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            bits = np.ascontiguousarray(tensor, dtype=np.float32).view(np.uint32)
            rounding = ((bits >> 16) & 1) + np.uint32(0x7FFF)  # to the nearest, ties to even
            done += file.write(((bits + rounding) >> 16).astype(np.uint16).tobytes())
            progress(FetchPhase.CONVERT, done, total)
