"""Attention over a ragged batch: tokens of many sequences in one row, without padding.

Registered with transformers under `NAME`. Each piece of the row belongs to one sequence and attends only to its KV, so
the batch affects a result only through rounding in matrix products. A model whose attention needs anything unknown
(soft caps, sinks, biases) is refused.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from harness.engines.huggingface.kv_storage import LayerKv, SequenceKv
from harness.errors import ModelError

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
