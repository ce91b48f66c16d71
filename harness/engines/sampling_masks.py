"""Sampling masks in replies: one for each output token, with the token in it, which else had no chance."""

import numpy as np
from msgspec import structs

from harness.errors import EngineRejected, EngineReplyInvalid
from harness.token_rows import RaggedRows
from harness.types import GenerationRequest, GenerationResult, SamplingParams, TokenIds

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
