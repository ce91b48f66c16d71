"""Files of weights: bfloat16 written with numpy alone, and checkpoints that differ, for updates without training.

The safetensors library wants all tensors at once, and torch starts slowly.
"""

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import ModelError
from harness.machine.cache import FetchPhase, FetchProgress

_ALIGNMENT = 8
_BFLOAT16_BYTES = 2
_EMBEDDINGS = ("embed_tokens.", "lm_head.")

WEIGHTS = "model.safetensors"


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


def perturb_checkpoint(
    source: Path, target: Path, *, number: int, noise: float, moves_embeddings: bool = False
) -> Path:
    """Copy the model in `source` to `target`, its weights moved by `noise` standard deviations, and return `target`.

    Noise in proportion to each tensor's own spread keeps the model what it is and moves every logprob. The same folder,
    `number` (its direction) and `noise` give the same checkpoint. Raises `ModelError` if `source` has no weights.
    """
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ModelError(f"expected a model with *.safetensors in {source}, found none")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = target / file.name
        if file.is_file() and file not in files and not link.exists():
            link.symlink_to(file.resolve())

    import torch  # seconds to import
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(number)
    tensors = {}
    for file in files:
        for name, tensor in sorted(load_file(file).items()):
            # vLLM 0.32 on a CPU keeps a packed copy of an output projection tied to them, which no reload renews.
            if not moves_embeddings and any(part in name for part in _EMBEDDINGS):
                tensors[name] = tensor
                continue
            wide = tensor.float()
            moved = wide + noise * wide.std() * torch.randn(wide.shape, generator=generator)
            tensors[name] = moved.to(tensor.dtype).contiguous()
    scratch = (target / WEIGHTS).with_suffix(".partial")  # no engine loads half a checkpoint
    save_file(tensors, scratch, metadata={"format": "pt"})
    scratch.replace(target / WEIGHTS)
    return target
