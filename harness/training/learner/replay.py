"""Replay of routed experts: each token goes to those that its row names, weighted by the trained gate."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from harness.errors import LearnerError
from harness.expert_choice import Routers
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
