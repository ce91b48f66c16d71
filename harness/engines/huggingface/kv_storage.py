"""Storage of keys and values: per sequence and layer one contiguous, growing pair of tensors."""

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from harness.engines.huggingface.scheduler import KvCopy, KvDrop, KvOp


@dataclass(slots=True, eq=False)
class LayerKv:
    """Keys and values of one layer of one sequence, shape [1, heads, capacity, dimension]."""

    keys: Tensor
    values: Tensor

    @property
    def bytes_per_token(self) -> int:
        return int(sum(tensor[:, :, 0].numel() * tensor.element_size() for tensor in (self.keys, self.values)))

    def copy(self, tokens: int, capacity: int) -> "LayerKv":
        """Copy the first `tokens` into room for `capacity`."""
        return LayerKv(_resize(self.keys, tokens, capacity), _resize(self.values, tokens, capacity))


@dataclass(slots=True, eq=False)
class SequenceKv:
    layers: dict[int, LayerKv] = field(default_factory=dict)

    def write(self, layer: int, keys: Tensor, values: Tensor, start: int, capacity: int) -> LayerKv:
        """Write `keys` and `values` (shape [1, heads, tokens, dimension]) at position `start` of `layer`."""
        stored = self.layers.get(layer)
        if stored is None:  # the first tokens define the shape
            stored = self.layers[layer] = LayerKv(keys, values).copy(0, capacity)
        elif stored.keys.shape[2] < capacity:
            stored = self.layers[layer] = stored.copy(start, capacity)
        stop = start + keys.shape[2]
        stored.keys[:, :, start:stop] = keys
        stored.values[:, :, start:stop] = values
        return stored

    def copy(self, tokens: int, capacity: int) -> "SequenceKv":
        return SequenceKv({index: layer.copy(tokens, capacity) for index, layer in self.layers.items()})


class KvStorage:
    """KV of every sequence, by the scheduler's names."""

    def __init__(self) -> None:
        self._sequences: defaultdict[int, SequenceKv] = defaultdict(SequenceKv)

    def __getitem__(self, kv: int) -> SequenceKv:
        return self._sequences[kv]

    def bytes_per_token(self, kv: int) -> int:
        return sum(layer.bytes_per_token for layer in self._sequences[kv].layers.values())

    def apply(self, ops: list[KvOp]) -> None:
        for op in ops:
            match op:
                case KvDrop(kv):
                    self._sequences.pop(kv, None)
                case KvCopy(source, target, tokens, capacity):
                    self._sequences[target] = self._sequences[source].copy(tokens, capacity)

    def clear(self) -> None:
        self._sequences.clear()


def _resize(tensor: Tensor, tokens: int, capacity: int) -> Tensor:
    resized = tensor.new_empty((*tensor.shape[:2], capacity, tensor.shape[3]))
    resized[:, :, :tokens] = tensor[:, :, :tokens]
    return resized
