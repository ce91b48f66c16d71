"""Rows in requests and replies, routed experts and sampling masks: what may be asked, and what a reply must be.

A wrong row trains another policy without a sign. So routed experts are all that was asked for, of the model's shape, or
none, and each output token has a mask with the token in it, which else had no chance.
"""

import json
from pathlib import Path

import numpy as np
from msgspec import structs

from harness.errors import EngineRejected, EngineReplyInvalid
from harness.token_rows import RaggedRows, RoutedExperts
from harness.types import GenerationRequest, GenerationResult, SamplingParams, TokenIds


def find_router(folder: Path) -> RoutedExperts | None:
    """Return the router that the configuration of the model in `folder` describes; None for a dense or unknown one."""
    try:
        return RoutedExperts.of_config(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError):
        return None


def check_asked(engine: str, router: RoutedExperts | None, request: GenerationRequest) -> None:
    """Raise `EngineRejected` for rows that the engine cannot return."""
    start, size = request.rows_from, request.input_ids.size
    if start is None:
        return
    if router is None:
        raise EngineRejected(f"{engine} returns no routed experts; create sessions without `record`")
    if not 0 <= start < size:
        raise EngineRejected(f"rows start at 0..{size - 1}, got {start}")


def check_returned(
    engine: str, router: RoutedExperts | None, request: GenerationRequest, result: GenerationResult
) -> None:
    """Raise `EngineReplyInvalid` unless the rows of `result` are missing, or those that `request` asked for."""
    start, rows = request.rows_from, result.rows
    if rows is None or not result.output_ids.size:
        return
    if start is None or router is None:
        raise EngineReplyInvalid(f"{engine} returned routed experts that were not asked for; nothing of it is used")
    tokens = int(request.input_ids.size + result.output_ids.size) - 1 - start
    expected, found = [tokens, router.layers, router.top_k], [*rows.values.shape]
    if rows.start != start or found != expected:
        raise EngineReplyInvalid(
            f"{engine}: expected routed experts from position {start} on, of shape {expected} (tokens, layers, experts"
            f" of a token), got {found} from {rows.start} on; nothing of it is used, check that it honors the offset"
        )
    if rows.values.dtype != router.dtype or rows.values.max() >= router.experts:
        raise EngineReplyInvalid(
            f"{engine}: expected expert ids 0..{router.experts - 1} as {np.dtype(router.dtype)}, got ids up to"
            f" {rows.values.max()} as {rows.values.dtype}; nothing of it is used, check the model that it serves"
        )


MAX_MASK_IDS = 4096
"""Bound of the engines in this process; SGLang's default."""


def require_masks(engine: str, most: int, params: SamplingParams) -> None:
    """Raise `EngineRejected` for masks that the engine cannot return."""
    if params.sampling_mask and not most:
        raise EngineRejected(f"{engine} returns no sampling masks; create sessions without `record`")


def check_masks(
    engine: str, vocab_size: int, most: int, request: GenerationRequest, result: GenerationResult
) -> GenerationResult:
    """Return `result` with masks in the narrowest dtype, if any. Raises `EngineReplyInvalid` for wrong ones."""
    masks = result.masks
    if masks is None or not result.output_ids.size:
        return result if masks is None else structs.replace(result, masks=None)
    wrong = "sampling masks that were not asked for"
    if request.params.sampling_mask:
        wrong = _find_wrong(masks, result.output_ids, vocab_size, most)
    if wrong:
        raise EngineReplyInvalid(f"{engine} returned {wrong}; nothing of it is used")
    narrow = masks.values.astype(np.min_scalar_type(vocab_size - 1))
    return structs.replace(result, masks=RaggedRows(int(request.input_ids.size), narrow, masks.offsets))


def _find_wrong(masks: RaggedRows, ids: TokenIds, vocab_size: int, most: int) -> str:
    lengths, values = np.diff(masks.offsets), masks.values
    if lengths.size != ids.size:
        return f"{lengths.size} sampling masks for {ids.size} output tokens"
    if values.size and not 0 <= values.min() <= values.max() < vocab_size:
        return f"sampling masks with ids {values.min()}..{values.max()}, expected 0..{vocab_size - 1}"
    if (lengths > most).any():
        return f"a sampling mask of {lengths.max()} ids at output token {lengths.argmax()}, expected at most {most}"
    found = np.repeat(np.arange(ids.size), lengths)[values == np.repeat(ids, lengths)]
    counts = np.bincount(found, minlength=ids.size)
    at = int((counts != 1).argmax())
    return "" if counts[at] == 1 else f"a sampling mask with {counts[at]} of its token {ids[at]} at {at}, expected one"
