"""Reverse KL divergence of the trained policy from teachers that return their most likely tokens.

It is over those tokens and one event for all others: by the log-sum inequality a lower bound, which is exact once
nothing is left over. Its gradient has no sampling noise (arXiv:2306.13649), unlike that of the sampled token.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from harness.samples.packs import Pack
from harness.top_logprobs import TopLogprobs

_LEAST_REST = 1e-6  # probability; rounding makes a smaller one of a difference of sums


def distill(weights: Mapping[str, float], pack: Pack, logits: Tensor) -> Tensor | float:
    """Return the weighted divergences [t] of `logits` at `pack.logit_positions`."""
    trained = pack.logit_positions + 1
    return sum(
        weights[name] * reverse_kl(logits, TopLogprobs(top.ids[trained], top.logprobs[trained]))
        for name, top in pack.teacher_tops.items()
        if name in weights
    )


def reverse_kl(logits: Tensor, top: TopLogprobs) -> Tensor:
    """Return the divergence [t] from `logits` [t, vocabulary] to `top` [t, k]; 0 where the teacher is missing."""
    precise = logits if logits.dtype == torch.float64 else logits.float()
    ids = torch.from_numpy(top.ids.astype(np.int64)).to(logits.device)
    theirs = torch.from_numpy(top.logprobs).to(precise)
    # A teacher of the same tokenizer may pad its vocabulary: ids that the policy lacks belong to the rest.
    is_known = (ids >= 0) & (ids < precise.shape[-1])
    logprobs = precise.log_softmax(dim=-1).gather(1, ids.where(is_known, 0))
    mine, its = (each.exp().where(is_known, 0.0) for each in (logprobs, theirs))
    inside = (mine * (logprobs - theirs).where(is_known, 0.0)).sum(dim=-1)
    rest, its_rest = ((1 - each.sum(dim=-1)).clamp_min(_LEAST_REST) for each in (mine, its))
    return (inside + rest * (rest.log() - its_rest.log())).where(is_known.any(dim=-1), 0.0)
