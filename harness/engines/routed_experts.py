"""Routed experts in requests and replies: what may be asked, and what a reply must be.

A wrong row trains another policy without a sign. So rows are all that was asked for, of the model's shape, or none.
"""

import json
from pathlib import Path

import numpy as np

from harness.errors import EngineRejected, EngineReplyInvalid
from harness.token_rows import RoutedExperts
from harness.types import GenerationRequest, GenerationResult


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
