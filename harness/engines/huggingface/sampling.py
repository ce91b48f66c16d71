"""Samples tokens from logits for many requests at once.

The token with the largest `logit / temperature + Gumbel noise` is a sample of the softmax. The noise depends only on
the request's seed and the token's position, so a request is reproducible in any batch and after an interruption, up to
rounding. Logprobs are the model's own, before temperature and filters; with a sampling mask, over the candidates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.engines.huggingface.local_generation import SampledToken
from harness.engines.recorded_rows import MAX_MASK_IDS
from harness.errors import EngineReplyInvalid
from harness.top_logprobs import TopLogprobs
from harness.types import Logprobs, SamplingParams, TokenIds

_LIKELY_CANDIDATES = 1024  # nearly always contain top-p, and are far cheaper to find than a full sort
_WORD = 2**64 - 1


class SamplingRow(NamedTuple):
    """Parameters for sampling from one row of logits."""

    params: SamplingParams
    seed: int
    position: int
    """Index of the token in its sequence, including the prompt."""
    forbidden: tuple[int, ...] = ()
    """Ids that must not be sampled."""
    told: int | None = None
    """Id that a script requires; None lets the model sample."""


def logprobs_of(logits: Tensor, token_ids: TokenIds) -> Logprobs:
    """Return the logprob of `token_ids[i]` in row i of `logits`."""
    wanted = torch.from_numpy(token_ids.astype(np.int64))
    chosen = logits.gather(1, wanted[:, None]).squeeze(1) - torch.logsumexp(logits, dim=-1)
    scores: Logprobs = chosen.numpy()
    _require_finite(scores)
    return scores


def top_of(logits: Tensor, count: int) -> TopLogprobs:
    """Return the `count` most likely tokens of each row."""
    best, ids = logits.topk(count)
    logprobs = best - logits.logsumexp(dim=-1, keepdim=True)
    return TopLogprobs(ids.numpy().astype(np.int32), logprobs.numpy())


def sample(logits: Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """Sample one token for each row of `logits`, float32 [rows, vocabulary]."""
    choices = [_choose(logits[index], row) for index, row in enumerate(rows)]
    token_ids = np.array([choice.token_id for choice in choices])
    normalizers = logits.logsumexp(dim=-1).numpy()
    logprobs = logits.numpy()[np.arange(len(rows)), token_ids] - normalizers
    _require_finite(logprobs)
    sampled = [
        _with_mask(choice) if row.params.sampling_mask else SampledToken(choice.token_id, logprob)
        for choice, row, logprob in zip(choices, rows, logprobs.tolist(), strict=True)
    ]
    counts = [row.params.top_logprobs for row in rows]
    if not any(counts):
        return sampled
    top = top_of(logits, max(counts))
    return [
        token._replace(top_ids=ids[:count], top_logprobs=scores[:count])
        for token, count, ids, scores in zip(sampled, counts, top.ids.tolist(), top.logprobs.tolist(), strict=True)
    ]


class _Choice(NamedTuple):
    token_id: int
    scaled: Tensor | None = None
    """Logits after temperature, minus infinity where filtered; None if the token was the only candidate."""


def _with_mask(choice: _Choice) -> SampledToken:
    if choice.scaled is None:
        return SampledToken(choice.token_id, 0.0, mask=[choice.token_id])
    logprob = float(choice.scaled[choice.token_id] - choice.scaled.logsumexp(dim=-1))
    return SampledToken(choice.token_id, logprob, mask=np.flatnonzero(choice.scaled.numpy() > -np.inf))


def _choose(logits: Tensor, row: SamplingRow) -> _Choice:
    # One row at a time, because a row fits into the processor's cache.
    if row.told is not None:
        return _Choice(row.told)
    if row.forbidden:
        logits = logits.index_fill(0, torch.tensor(row.forbidden), -torch.inf)
    if row.params.temperature == 0:
        return _Choice(int(logits.argmax()))
    scaled = filter_logits(logits, row.params)
    # Double precision: with steps of 2**-24, one of 50,000 candidates would draw an exact zero, and win, several times
    # in a thousand tokens.
    key = np.array([row.seed & _WORD, row.position], np.uint64)
    noise = np.random.Generator(np.random.Philox(key=key)).standard_exponential(scaled.numel())
    np.log(noise, out=noise)
    return _Choice(int(np.subtract(scaled.numpy(), noise, out=noise).argmax()), scaled)


def filter_logits(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return `logits` [vocabulary] after temperature, minus infinity where an id is no candidate."""
    scaled = (logits - logits.max()) / params.temperature
    top_k = params.top_k or (MAX_MASK_IDS if params.sampling_mask else 0)
    if 0 < top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = -np.inf
    if params.top_p < 1:  # of what top-k has left
        scaled[scaled < _top_p_threshold(scaled, params.top_p)] = -np.inf
    if params.min_p > 0:
        scaled[scaled < scaled.max() + np.log(params.min_p)] = -np.inf
    return scaled


def _top_p_threshold(scaled: Tensor, top_p: float) -> Tensor:
    total = scaled.logsumexp(dim=-1)
    likely = scaled.topk(min(_LIKELY_CANDIDATES, scaled.numel())).values
    if (likely - total).exp().sum() < top_p:
        likely = scaled.sort(descending=True).values
    before = (likely - total).exp().cumsum(dim=-1).roll(1)
    before[0] = 0
    return likely[before < top_p][-1]


def _require_finite(logprobs: Logprobs) -> None:
    if not np.isfinite(logprobs).all():
        raise EngineReplyInvalid("the model gives a logprob that is not a number; its weights are broken")
