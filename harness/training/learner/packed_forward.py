"""Packed forward pass: logprobs of trained tokens, attention inside each segment only, and routed experts replayed.

Attention is registered with transformers under `NAME`: segment by segment, or torch's variable-length kernel on a GPU
in half precision. Logits exist only for trained tokens. A token goes to the experts that its row names, weighted by the
trained gate.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface

from harness.errors import LearnerError
from harness.expert_choice import Routers
from harness.samples.packs import Pack
from harness.samples.segments import Segment
from harness.sampling_masks import SampleMasks
from harness.token_rows import RowState, SampleRows


@contextmanager
def replaying(routers: Routers, rows: SampleRows | None, device: torch.device) -> Iterator[None]:
    """Replay the `rows` of a pack in forward and backward passes of the block; a token without a row chooses itself.

    Raises `LearnerError` for rows of another model.
    """
    present = np.zeros(0, np.bool_) if rows is None else rows.states == RowState.PRESENT
    if rows is None or not present.any():
        yield
        return
    _require_own(routers, rows)
    experts, is_present = torch.from_numpy(rows.values).to(device), torch.from_numpy(present).to(device)[:, None]

    def choose(layer: int, own: Tensor) -> Tensor:
        return torch.where(is_present, experts[:, layer].long(), own)

    with routers.choosing(choose):
        yield


def _require_own(routers: Routers, rows: SampleRows) -> None:
    shape, found = routers.shape, [*rows.values.shape[1:]]
    if shape is None:
        raise LearnerError(
            "samples have routed experts and the trained model has no router; train the one that sampled"
        )
    if found != [shape.layers, shape.top_k] or rows.values.max() >= shape.experts:
        raise LearnerError(
            f"expected rows of {shape.layers} layers x {shape.top_k} experts below {shape.experts}, got {found} up to"
            f" {rows.values.max()}; train the model that sampled"
        )


NAME = "harness_packed"

_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "position_embeddings", "output_router_logits"})
_CHECKED_LENGTHS = (5, 9, 2)
_KERNEL_DTYPES = frozenset({torch.float16, torch.bfloat16})
# Rounding stays below half of these.
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest logprob difference by compute precision."""


def prepare(model: Any) -> None:
    """Set this attention on a causal `model`, without dropout. Raises `LearnerError` if packs change logprobs."""
    size = int(model.config.get_text_config().vocab_size)
    # Everything but attention works on single tokens in a decoder. A model with state between tokens would let segments
    # see each other.
    segments = [Segment.of_tokens(np.arange(length) * 7919 % size) for length in _CHECKED_LENGTHS]
    AttentionInterface.register(NAME, _attend)
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        alone = torch.cat([_plain_logprobs(model, segment) for segment in segments])
        model.set_attn_implementation(NAME)
        try:
            packed = packed_logprobs(model, Pack.of(segments, range(len(segments))))
        except (TypeError, ValueError, RuntimeError) as error:
            raise LearnerError(f"{type(model).__name__} cannot be trained on packs: {error}") from error
    difference = float((alone - packed).abs().max())
    tolerance = _TOLERANCES[_compute_dtype(model.device.type, model.dtype)]
    if not difference <= tolerance:
        raise LearnerError(
            f"{type(model).__name__} cannot be trained on packs: logprobs of a pack differ from its segments'"
            f" alone by {difference:.2g}, at most {tolerance} is allowed; something but attention joins its tokens"
        )


def packed_logprobs(model: Any, pack: Pack) -> Tensor:
    """Return logprobs [t] of the trained tokens, at least float32. Raises like `packed_logits`."""
    return logprobs_in(pack, packed_logits(model, pack))


def packed_logits(model: Any, pack: Pack) -> Tensor:
    """Return logits [t, vocabulary] for the trained tokens.

    Raises `LearnerError` for unsupported attention arguments.
    """
    device = model.device
    position_ids = torch.from_numpy(pack.position_ids.astype(np.int64)).to(device)
    logits: Tensor = model(
        input_ids=torch.from_numpy(pack.ids.astype(np.int64))[None].to(device),
        position_ids=position_ids if position_ids.shape[0] == 1 else position_ids[:, None],
        logits_to_keep=torch.from_numpy(pack.logit_positions).to(device),
        use_cache=False,
        borders=torch.from_numpy(pack.cu_seqlens.copy()).to(device),
        segment_lengths=np.diff(pack.cu_seqlens).tolist(),
    ).logits[0]
    return logits


def logprobs_in(pack: Pack, logits: Tensor) -> Tensor:
    """Return logprobs [t] of the trained tokens in `packed_logits`."""
    kept = pack.logit_positions
    masks = None if pack.sampling_mask is None else pack.sampling_mask.at(kept + 1)
    return _logprobs_of(pack.ids[kept + 1], logits, masks)


def _plain_logprobs(model: Any, segment: Segment) -> Tensor:
    ids = torch.from_numpy(segment.ids.astype(np.int64))[None].to(model.device)
    return _logprobs_of(segment.ids[1:], model(input_ids=ids, use_cache=False).logits[0, :-1])


def _logprobs_of(ids: npt.NDArray[np.int32], logits: Tensor, masks: SampleMasks | None = None) -> Tensor:
    precise = logits if logits.dtype == torch.float64 else logits.float()
    wanted = torch.from_numpy(ids.astype(np.int64)).to(logits.device)
    logprobs = -cross_entropy(precise, wanted, reduction="none")
    if masks is None:
        return logprobs
    # Over its candidates a token has the probability 1 / sum exp(logit of a candidate - its own logit).
    lengths, candidates = (
        torch.from_numpy(each.astype(np.int64)).to(logits.device) for each in (np.diff(masks.offsets), masks.values)
    )
    owners = torch.arange(len(lengths), device=logits.device).repeat_interleave(lengths)
    above = precise[owners, candidates] - precise[owners, wanted[owners]]
    sums = torch.zeros_like(logprobs).index_add(0, owners, above.exp())
    return torch.where(lengths > 0, -torch.where(lengths > 0, sums, 1).log(), logprobs)


def _attend(
    module: Any,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    borders: Tensor,
    segment_lengths: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    unknown = [name for name, value in extras.items() if value is not None and name not in _HARMLESS]
    if attention_mask is not None or dropout or unknown:
        reasons = ", ".join(unknown) or "a mask or dropout"
        raise LearnerError(f"this model cannot be trained on packs: its attention needs {reasons}")
    is_grouped = query.shape[1] != key.shape[1]
    dtype = _compute_dtype(query.device.type, query.dtype)
    if not query.is_cuda or dtype not in _KERNEL_DTYPES:
        attended = []
        for part in zip(*(each.split(segment_lengths, dim=2) for each in (query, key, value)), strict=True):
            mask = None
            if sliding_window is not None and sliding_window < (length := part[0].shape[2]):
                visible = torch.ones(length, length, dtype=torch.bool, device=query.device)
                mask = visible.tril().triu(1 - sliding_window)
            about = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": is_grouped}
            attended.append(scaled_dot_product_attention(*part, **about))
        return torch.cat(attended, dim=2).transpose(1, 2), None
    try:
        from torch.nn.attention.varlen import varlen_attn  # not needed on a CPU
    except ImportError as error:
        raise LearnerError("packs in 16 bits on a GPU: expected torch 2.11 or newer") from error

    takes_groups = "enable_gqa" in signature(varlen_attn).parameters  # torch 2.11 does not
    if is_grouped and not takes_groups:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    grouped = {"enable_gqa": is_grouped} if takes_groups else {}
    rows = [each[0].transpose(0, 1).to(dtype) for each in (query, key, value)]
    longest = max(segment_lengths)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    whole = varlen_attn(*rows, borders, borders, longest, longest, scale=scaling, window_size=window, **grouped)
    return whole[None].to(query.dtype), None


def _compute_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else dtype
