"""Checks whether a checkpoint fits the weights of an engine server before the server loads it.

Tensors of other shapes end a SGLang server and leave a vLLM server without weights. The headers of safetensors files
give names and shapes without reading weights. Both folders must be readable here; if not, nothing is refused.
"""

from pathlib import Path

import msgspec

from harness.decoding import read_json
from harness.errors import EngineRejected

_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100 << 20  # as in the safetensors format
_MAY_BE_TIED = frozenset({"lm_head.weight"})
_SHOWN = 3


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


def require_fitting(current: Path, new: Path) -> None:
    """Raise `EngineRejected` if the tensors in `new` differ from those in `current`, as far as both are readable."""
    if not current.is_dir():
        return
    if not new.is_dir():
        raise EngineRejected(f"expected a folder with a checkpoint, there is none at {new}; weights not changed")
    expected = _shapes(current)
    if not expected:
        return
    found = _shapes(new)
    misfits = [
        f"{name} has shape {found.get(name)}, expected {expected.get(name)}"
        for name in sorted((expected.keys() | found.keys()) - _MAY_BE_TIED)
        if expected.get(name) != found.get(name)
    ]
    if misfits:
        raise EngineRejected(
            f"the checkpoint in {new} does not fit the weights being served: {'; '.join(misfits[:_SHOWN])}"
            f" ({len(misfits)} of {len(expected)} tensors); weights not changed"
        )


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            content = file.read(min(length, _LONGEST_HEADER_BYTES))
        try:
            entries = read_json(content, dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            shapes |= {name: read_json(entry, _Tensor).shape for name, entry in entries.items()}
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            raise EngineRejected(f"{path} is not a safetensors file ({error}); weights not changed") from error
    return shapes
