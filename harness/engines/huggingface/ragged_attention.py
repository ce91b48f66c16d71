"""Attention over a ragged batch: tokens of many sequences in one row, without padding, and the storage of their KV.

Registered with transformers under `NAME`. Each piece of the row belongs to one sequence and attends only to its KV, so
the batch affects a result only through rounding in matrix products. A model whose attention needs anything unknown
(soft caps, sinks, biases) is refused.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from harness.engines.huggingface.scheduler import KvCopy, KvDrop, KvOp
from harness.errors import ModelError


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


NAME = "harness_ragged"

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "position_embeddings", "output_router_logits"})


class RaggedPiece:
    """Tokens `start..stop` of one sequence, at `first..last` of the row."""

    __slots__ = ("_masks", "capacity", "first", "kv", "last", "start", "stop")

    def __init__(self, kv: SequenceKv, *, start: int, stop: int, first: int, capacity: int) -> None:
        self.kv = kv
        self.start = start
        self.stop = stop
        self.first = first
        self.last = first + stop - start
        self.capacity = capacity
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query: Tensor, stored: LayerKv, scale: float, window: int | None) -> Tensor:
        """Compute attention for the piece's queries, shape [1, heads, tokens, dimension]."""
        oldest = 0 if window is None else max(0, self.start + 1 - window)
        is_whole = self.start == 0 and (window is None or self.stop <= window)
        is_single = self.stop - self.start == 1
        return scaled_dot_product_attention(
            query,
            stored.keys[:, :, oldest : self.stop],
            stored.values[:, :, oldest : self.stop],
            attn_mask=None if is_whole or is_single else self._mask(query, oldest, window),
            is_causal=is_whole and not is_single,
            scale=scale,
            enable_gqa=query.shape[1] != stored.keys.shape[1],
        )

    def _mask(self, query: Tensor, oldest: int, window: int | None) -> Tensor:
        # Every layer with this window shares the mask.
        if window not in self._masks:
            token = torch.arange(self.start, self.stop, device=query.device)[:, None]
            seen = torch.arange(oldest, self.stop, device=query.device)[None, :]
            visible = seen <= token
            self._masks[window] = visible if window is None else visible & (seen > token - window)
        return self._masks[window]


def register() -> None:
    """Register the attention with transformers; it creates no mask for it."""
    AttentionInterface.register(NAME, _attend)


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: Sequence[RaggedPiece],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name, value in extras.items() if value is not None and name not in _HARMLESS]
    if attention_mask is not None or dropout or unknown:
        reasons = ", ".join(unknown) or "a mask or dropout"
        raise ModelError(f"the local engine cannot run this model: its attention needs {reasons}; serve it elsewhere")
    layer: int = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = query.new_zeros((1, query.shape[2], query.shape[1], value.shape[-1]))
    for piece in ragged:
        rows = slice(piece.first, piece.last)
        stored = piece.kv.write(layer, key[:, :, rows], value[:, :, rows], piece.start, piece.capacity)
        attended = piece.attend(query[:, :, rows], stored, scale, sliding_window)
        output[:, rows] = attended.transpose(1, 2)
    return output, None
