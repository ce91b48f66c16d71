"""Losses per trained token. A learner sums them, and normalizes once per step.

With pi the trained policy, A the advantage, r = pi / older policy, and c(r) = r between 1 - clip_low and 1 + clip_high:

    cross_entropy    -A ln pi
    ppo, grpo        -min(r A, c(r) A)       older policy: behavior
    decoupled_ppo    -w min(r A, c(r) A)     older policy: proximal

    with w = min(proximal / behavior, weight_cap), no gradient

A teacher that returns its most likely tokens adds the reverse KL divergence from the policy to it, over those tokens
and one event for all others: by the log-sum inequality a lower bound, which is exact once nothing is left over. Its
gradient has no sampling noise (arXiv 2306.13649), unlike that of the sampled token.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.samples.packs import Pack
from harness.samples.versions import NOT_SAMPLED
from harness.top_logprobs import TopLogprobs
from harness.training.learner.learner import LossKind, LossSettings

_LEAST_REST = 1e-6  # probability; rounding makes a smaller one of a difference of sums


class TrainedTokens(NamedTuple):
    """Tensors [t], in the dtype of `logprobs`."""

    logprobs: Tensor
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor
    advantages: Tensor
    is_sampled: Tensor

    @classmethod
    def of(cls, pack: Pack, logprobs: Tensor) -> "TrainedTokens":
        """Select columns of `pack` for `logprobs` at `pack.logit_positions`."""
        trained = pack.logit_positions + 1

        def column(name: str) -> Tensor:
            return torch.from_numpy(getattr(pack, name)[trained]).to(logprobs)

        is_sampled = torch.from_numpy(pack.behavior_versions[trained] != NOT_SAMPLED).to(logprobs.device)
        return cls(logprobs, column("behavior_logprobs"), column("proximal_logprobs"), column("advantages"), is_sampled)


class TokenLosses(NamedTuple):
    """Tensors [t]; only `loss` has a gradient."""

    loss: Tensor
    is_compared: Tensor  # bool: has a ratio, so that the figures below are valid
    ratio: Tensor
    log_ratio: Tensor
    is_clipped: Tensor
    weight: Tensor
    is_capped: Tensor


Loss = Callable[[TrainedTokens], TokenLosses]


def cross_entropy(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:  # noqa: ARG001
    """Weight the negative logprob by the advantage."""
    nothing = torch.zeros_like(tokens.is_sampled)
    ones = torch.ones_like(tokens.advantages)
    return TokenLosses(-tokens.advantages * tokens.logprobs, nothing, ones, ones - 1, nothing, ones, nothing)


def ppo(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:
    """Clip the ratio to the behavior policy."""
    return _clip(tokens, settings, tokens.behavior_logprobs, torch.ones_like(tokens.advantages))


def decoupled_ppo(tokens: TrainedTokens, settings: LossSettings) -> TokenLosses:
    """Clip the ratio to the proximal policy, weighted."""
    # A token without its next policy has equal logprobs: weight 1, which is plain PPO.
    weight = (tokens.proximal_logprobs - tokens.behavior_logprobs).exp()
    return _clip(tokens, settings, tokens.proximal_logprobs, weight)


# Sources. PPO: Schulman et al. 2017 (arXiv 1707.06347), without a value function. GRPO: Shao et al. 2024 (arXiv
# 2402.03300), with the token sum of DAPO (arXiv 2503.14476) and Dr. GRPO (arXiv 2503.20783), without a reference
# policy. Decoupled PPO: Hilton et al. 2021 (arXiv 2110.00641), with behavior policies that change inside an answer as
# in AReaL (arXiv 2505.24298). Weights are truncated as in IMPALA (arXiv 1802.01561); AReaL drops such tokens.
LOSSES: Mapping[LossKind, Callable[[TrainedTokens, LossSettings], TokenLosses]] = {
    LossKind.CROSS_ENTROPY: cross_entropy,
    LossKind.PPO: ppo,
    LossKind.GRPO: ppo,  # it differs in its advantages
    LossKind.DECOUPLED_PPO: decoupled_ppo,
}


def loss_of(settings: LossSettings) -> Loss:
    function = LOSSES[settings.kind]
    return lambda tokens: function(tokens, settings)


def _clip(tokens: TrainedTokens, settings: LossSettings, older_logprobs: Tensor, weight: Tensor) -> TokenLosses:
    log_ratio = tokens.logprobs - older_logprobs
    ratio = log_ratio.exp()
    gain = ratio * tokens.advantages
    clipped_gain = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * tokens.advantages
    capped_weight = weight.clamp(max=settings.weight_cap)
    return TokenLosses(
        loss=torch.where(
            tokens.is_sampled,  # else no older policy: cross-entropy
            -capped_weight * torch.minimum(gain, clipped_gain),
            -tokens.advantages * tokens.logprobs,
        ),
        is_compared=tokens.is_sampled,
        ratio=ratio.detach(),
        log_ratio=log_ratio.detach(),
        is_clipped=(clipped_gain < gain).detach(),
        weight=capped_weight,
        is_capped=weight > settings.weight_cap,
    )


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
