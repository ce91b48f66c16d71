"""Does a checkpoint fit the weights that an engine server has loaded? Asked before the server is.

A SGLang server ends when tensors of a new checkpoint have other shapes, a vLLM server is left without weights. The
headers of safetensors files tell names and shapes without reading a weight. Both folders have to be readable here, on a
shared file system or on one machine; where they are not, nothing is known and nothing is refused.
"""

from pathlib import Path

import msgspec

from harness.errors import EngineRejected

_LENGTH_BYTES = 8
_LONGEST_HEADER_BYTES = 100 << 20  # as in the safetensors format
_MAY_BE_TIED = frozenset({"lm_head.weight"})
_SHOWN = 3


class _Tensor(msgspec.Struct):
    shape: tuple[int, ...]


def require_fitting(current: Path, new: Path) -> None:
    """Raises `EngineRejected` when the tensors in `new` are not those in `current`, as far as both can be seen."""
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
    """Shape of every tensor in the folder; empty when there are no safetensors files in it.

    Raises `EngineRejected` when a file of that name is none.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            content = file.read(min(length, _LONGEST_HEADER_BYTES))
        try:
            entries = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            shapes |= {name: msgspec.json.decode(entry, type=_Tensor).shape for name, entry in entries.items()}
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            raise EngineRejected(f"{path} is not a safetensors file ({error}); weights not changed") from error
    return shapes
